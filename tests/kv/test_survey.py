"""The index as a picture: what is told of it is what is in it, also while it changes."""

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_kv import as_array

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.terms import NO_TERMS, Terms, prompt_id

A = Namespace("w", "t", "c", "l", "d", "r")
B = Namespace("w", "t", "c", "l", "d", "r", salt="b")


def store(manager, tokens, namespace=A, terms=NO_TERMS):
    with manager.acquire(namespace, as_array(tokens), terms=terms) as lease:
        assert lease.reserve(len(tokens))
        lease.take_copies()
        lease.commit(as_array(tokens))


def paths(survey):
    """Every node's tokens from the first one on, as the survey's parents tell."""
    found = []
    for node in survey.nodes:
        above = () if node.parent < 0 else found[node.parent][1]
        own = tuple(np.frombuffer(node.tokens, np.int32).tolist())
        assert node.depth_tokens == len(above)
        found.append((survey.spaces[node.space].digest, above + own))
    return found


def test_nothing_is_an_empty_survey():
    survey = KVManager(8, 4).surveyor.survey()
    assert (survey.nodes, survey.spaces) == ((), ())


def test_a_node_says_what_it_is():
    manager = KVManager(64, 4)
    store(manager, [1, 2, 3, 4, 5, 6, 7, 8], terms=Terms(prompt=prompt_id("guide")))
    for _ in range(2):  # a look-up that parts amid a node is no use of it: the second one counts
        store(manager, [1, 2, 3, 4, 9, 9, 9, 9])
    store(manager, [7, 7, 7, 7], B)
    survey = manager.surveyor.survey()
    assert {space.tenant for space in survey.spaces} == {A.tenant, B.tenant}
    assert sum(node.num_tokens for node in survey.nodes) == manager.num_cached_tokens == 16
    top = next(node for node in survey.nodes if node.parent < 0 and survey.spaces[node.space] == A)
    assert top.num_uses == 1
    assert top.prompt == prompt_id("guide")
    assert survey.rank >= top.last_used > 0
    facts = manager.surveyor.facts(top.serial)
    assert np.frombuffer(facts.path, np.int32).tolist() == [1, 2, 3, 4]
    assert (facts.num_children, facts.num_nodes_below, facts.tokens_below) == (2, 2, 8)
    assert (facts.parent, facts.num_pins, facts.num_held_blocks, facts.space) == (None, 0, 0, A)
    child = manager.surveyor.facts(facts.children[0])
    assert (child.parent, child.depth_tokens, len(child.path)) == (top.serial, 4, 32)
    assert manager.surveyor.facts(10**9) is None


def test_pins_and_leases_show():
    manager = KVManager(64, 4)
    store(manager, range(12))
    manager.pin(A, as_array(range(8)))
    pinned = [node for node in manager.surveyor.survey().nodes if node.num_pins]
    assert sum(node.num_tokens for node in pinned) == 8
    facts = manager.surveyor.facts(pinned[0].serial)
    assert (facts.num_pins, facts.num_held_blocks) == (1, facts.num_blocks)


def test_what_is_gone_is_not_found():
    manager = KVManager(64, 4)
    store(manager, range(8))
    (node,) = manager.surveyor.survey().nodes
    manager.clear()
    assert manager.surveyor.survey().nodes == ()
    assert manager.surveyor.facts(node.serial) is None


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=20)


@given(PROMPTS, st.lists(st.booleans(), min_size=20, max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_survey_is_the_index(prompts, is_other):
    manager = KVManager(400, 4)
    stored = {A.digest: set(), B.digest: set()}
    for tokens, other in zip(prompts, is_other, strict=False):
        space = B if other else A
        store(manager, tokens, space)
        stored[space.digest] |= {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}
    survey = manager.surveyor.survey()
    shown = {A.digest: set(), B.digest: set()}
    for digest, path in paths(survey):
        shown[digest] |= {path[:end] for end in range(1, len(path) + 1)}
    assert shown == stored
    assert len({node.serial for node in survey.nodes}) == len(survey.nodes)
    for node, (digest, path) in zip(survey.nodes, paths(survey), strict=True):
        facts = manager.surveyor.facts(node.serial)
        assert tuple(np.frombuffer(facts.path, np.int32).tolist()) == path
        assert facts.space.digest == digest


def test_looking_while_it_changes_breaks_nothing():
    manager = KVManager(300, 4)
    is_over = threading.Event()
    faults = []

    def look():
        while not is_over.is_set():
            try:
                survey = manager.surveyor.survey()
                assert all(node.parent < place for place, node in enumerate(survey.nodes))
                for node in survey.nodes[:5]:
                    manager.surveyor.facts(node.serial)
            except Exception as error:  # noqa: BLE001 - whatever it is
                faults.append(error)
                return

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(1)
    for _ in range(400):
        store(manager, rng.integers(0, 3, rng.integers(4, 60)).tolist())
    is_over.set()
    for thread in threads:
        thread.join()
    manager.check_integrity()
    assert faults == []
