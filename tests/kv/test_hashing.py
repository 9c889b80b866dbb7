"""Digests name exactly one thing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv.hashing import NO_PARENT, Namespace, block_keys, digest_bytes
from ostinato.kv.terms import id_from_bytes, id_to_bytes, is_id, model_id, prompt_id, tenant_id, tenant_salt

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


def test_a_salt_says_whose_it_is():
    plain = Namespace("w", "t", "c", "l", "d", "r")
    anna, ben = tenant_id("anna"), tenant_id("ben")
    assert plain.tenant == ""
    assert plain.with_salt("anna").tenant == anna != ben
    assert plain.with_salt("anna").with_salt("ben").tenant == ben
    first, second = plain.with_salt(tenant_salt(anna, "1")), plain.with_salt(tenant_salt(anna, "2"))
    assert first.tenant == second.tenant == anna
    assert first.digest != second.digest
    assert plain.with_salt("anna/1").tenant not in (anna, "")
    assert len(anna) == 3 + 32
    assert "anna" not in anna


@given(st.text(st.sampled_from("ab\0\ud800é"), max_size=3))
def test_an_id_names_its_text_and_survives_as_bytes(text):
    name = prompt_id(text)
    assert is_id(name)
    assert id_from_bytes(id_to_bytes(name)) == name
    assert (name == "") == (text == "")
    assert not is_id(text) or not text
    assert text == "" or len({tenant_id(text), model_id(text), prompt_id(text)}) == 3


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


# ---------------------------------------------------------------- blocks

BASE = Namespace("w", "t", "c", "l", "d", "r")


def test_block_keys_name_full_blocks_in_a_chain():
    tokens = np.arange(11, dtype=np.int32)
    keys = block_keys(BASE, tokens, 4)
    assert [key.tokens for key in keys] == [tokens[:4].tobytes(), tokens[4:8].tobytes()]
    assert [key.parent for key in keys] == [NO_PARENT, keys[0].hash]
    assert keys == block_keys(BASE, tokens[:8].astype(np.int64), 4)
    assert block_keys(BASE, tokens[:3], 4) == []


def test_a_block_hash_depends_on_all_that_stands_before_it_and_on_the_namespace():
    tokens = np.arange(12, dtype=np.int32)
    first_differs = tokens.copy()
    first_differs[0] = 99
    names = [
        block_keys(namespace, ids, size)[-1].hash
        for namespace, ids, size in (
            (BASE, tokens, 4),
            (BASE, first_differs, 4),
            (BASE, tokens, 6),
            (BASE.with_salt("tenant"), tokens, 4),
            (BASE, np.tile(tokens[-4:], 3), 4),
        )
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {32}


def test_a_block_hash_is_what_it_was():
    """Stored blocks outlive the program: a change of this value needs a new version in the context."""
    assert (
        block_keys(BASE, np.arange(4, dtype=np.int32), 4)[0].hash.hex()
        == "8122cea57cf293a1675407cd344807d36f3fe5f7ba9ead9216aabca7ecad5f38"
    )
