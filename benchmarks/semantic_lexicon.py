"""Makes the lexicon that the guards of the semantic cache read, out of WordNet 3.0's dictionary folder.

How: for every common word (one of the embedder's vocabulary, or met in WordNet's corpus) its first senses;
synonyms, antonyms, words with a common direct broader term (Monday, Tuesday) and words derived from one
another (decide, decision). Senses further down would make almost everything a synonym of everything.

    python benchmarks/semantic_lexicon.py /usr/share/wordnet VOCAB.txt \
        src/ostinato/responses/likeness/lexicon.txt.gz
"""

from __future__ import annotations

import gzip
import re
import sys
from collections import defaultdict
from pathlib import Path

_POS = ("noun", "verb", "adj", "adv")
_MAX_SENSES = {"noun": 3, "verb": 4, "adj": 3, "adv": 2}
_MAX_SIBLINGS = 60
_WORD = re.compile(r"[a-z][a-z-]*[a-z]$")

_HEAD = """# Words for the guards of Ostinato's semantic cache, from WordNet 3.0 by
# benchmarks/semantic_lexicon.py.
# WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.
# Permission to use, copy, modify and distribute this software and database and its documentation for any
# purpose and without fee or royalty is hereby granted, provided that you agree to comply with the copyright
# notice and statements, including the disclaimer, and that the same appear on ALL copies of the software,
# database and documentation, including modifications that you make for internal use or for distribution.
# THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR
# WARRANTIES, EXPRESS OR IMPLIED.
"""


def main(folder: Path, vocabulary: Path, target: Path) -> None:
    """Writes the lexicon."""
    tagged = {line.split("%")[0] for line in (folder / "cntlist.rev").read_text("latin-1").splitlines()}
    known = {word for word in tagged.union(vocabulary.read_text("utf-8").split()) if _WORD.match(word)}
    synonyms, antonyms, derived = set[tuple[str, ...]](), set[tuple[str, str]](), set[tuple[str, str]]()
    siblings: defaultdict[str, set[str]] = defaultdict(set)
    for pos in _POS:
        first = _first_senses(folder / f"index.{pos}", _MAX_SENSES[pos])
        synsets = dict(_synsets(folder / f"data.{pos}"))
        for offset, (words, pointers) in synsets.items():
            kept = tuple(word for word in words if word in known and offset in first.get(word, ()))
            if len(kept) > 1:
                synonyms.add(tuple(sorted(kept)))
            for kind, where, other_pos, source, target_at in pointers:
                if kind == "!" and source:
                    pair = (words[source - 1], synsets[where][0][target_at - 1])
                    if set(pair) <= known:
                        antonyms.add((min(pair), max(pair)))
                if kind == "@" and pos == "noun" and kept:
                    siblings[where].update(word for word in kept if offset in first[word][:2])
                if kind == "+" and source and other_pos in "nva":
                    derived.add((words[source - 1], f"{other_pos}{where}/{target_at}"))
    by_place = {}
    for pos in _POS:
        for offset, (words, _) in _synsets(folder / f"data.{pos}"):
            for at, word in enumerate(words, 1):
                by_place[f"{pos[0] if pos != 'adj' else 'a'}{offset}/{at}"] = word
    families = {
        (min(word, other), max(word, other))
        for word, place in derived
        if (other := by_place.get(place)) in known and word in known and word != other
    }
    lines = [f"S {' '.join(group)}" for group in sorted(synonyms)]
    lines += [f"A {one} {other}" for one, other in sorted(antonyms)]
    lines += [f"D {one} {other}" for one, other in sorted(families)]
    groups = {tuple(sorted(group)) for group in siblings.values() if 1 < len(group) <= _MAX_SIBLINGS}
    lines += [f"H {' '.join(group)}" for group in sorted(groups)]
    with target.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as out:
        out.write((_HEAD + "\n".join(lines) + "\n").encode())


def _first_senses(path: Path, num: int) -> dict[str, list[str]]:
    """Of every word the offsets of its most frequent senses."""
    found = {}
    for line in path.read_text("latin-1").splitlines():
        if not line.startswith(" "):
            fields = line.split()
            num_senses = int(fields[2])
            found[fields[0]] = fields[len(fields) - num_senses :][:num]
    return found


def _synsets(path: Path):
    """Offsets with words and pointers: kind, offset, part of speech, the words' numbers here and there."""
    for line in path.read_text("latin-1").splitlines():
        if line.startswith(" "):
            continue
        fields = line.split(" | ")[0].split()
        num_words = int(fields[3], 16)
        words = [re.sub(r"\(.*\)$", "", fields[4 + 2 * at]).lower() for at in range(num_words)]
        at = 4 + 2 * num_words
        pointers = []
        for place in range(at + 1, at + 1 + 4 * int(fields[at]), 4):
            kind, where, pos, ends = fields[place : place + 4]
            pointers.append((kind, where, pos, int(ends[:2], 16), int(ends[2:], 16)))
        yield fields[0], (words, pointers)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
