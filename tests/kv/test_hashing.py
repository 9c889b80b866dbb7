"""Digests name exactly one thing."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv.hashing import Namespace, digest_bytes

# Few characters and short fields, so that different tuples often concatenate to the same text.
awkward_text = st.text(st.sampled_from("ab\0\ud800é"), max_size=3)
field_tuples = st.tuples(*[awkward_text] * 8)


@given(field_tuples, field_tuples)
def test_namespaces_share_a_digest_exactly_when_all_fields_are_equal(a, b):
    assert (Namespace(*a).digest == Namespace(*b).digest) == (a == b)
    assert (Namespace(*a) == Namespace(*b)) == (a == b)


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_parts_cannot_run_into_each_other(a, b):
    assert (digest_bytes(*a, context="test") == digest_bytes(*b, context="test")) == (a == b)


def test_every_field_counts():
    fields = dict.fromkeys([f.name for f in dataclasses.fields(Namespace) if f.init], "x")
    assert len(fields) == 8
    digests = {Namespace(**fields).digest} | {Namespace(**fields | {name: "y"}).digest for name in fields}
    assert len(digests) == 9


def test_the_digest_is_versioned_and_stable():
    """A changed digest strands everything that a lower tier keeps: change the context's version with it."""
    namespace = Namespace("w", "t", "c", "l", "d", "r")
    assert namespace.digest == "b3:4fe7141e8ebd298008b2e6a9794af9698a132c8d9df5c6bc4e98ae964fa01be1"
    assert digest_bytes(b"x", context="one") != digest_bytes(b"x", context="two")
    assert digest_bytes(context="one").startswith("b3:")
    assert len(digest_bytes(context="one")) == 3 + 64
    with pytest.raises(AssertionError, match="context"):
        digest_bytes(b"x", context="")


def test_a_salt_makes_another_namespace_and_back():
    plain = Namespace("w", "t", "c", "l", "d", "r")
    salted = plain.with_salt("tenant")
    assert salted.digest != plain.digest
    assert salted.weights == "w"
    assert salted.with_salt("") == plain
    assert salted.with_salt("").digest == plain.digest
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.salt = "x"
