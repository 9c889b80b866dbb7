"""What a selection takes."""

from ostinato.kv.terms import Selection


def test_without_an_age_everything_is_taken_also_where_a_clock_went_back() -> None:
    assert Selection().takes_entry("", -5.0)
    assert Selection(min_age_s=1.0).takes_entry("", 1.0)
    assert not Selection(min_age_s=1.0).takes_entry("", -5.0)
