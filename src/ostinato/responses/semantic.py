"""The semantic cache: the kept answer of a question that means the same. Opt-in, because it can be wrong.

What may answer a question stands in its *space*: same tenant, model, system text, tools, parameters, the same
conversation before the last message, and whatever the caller adds. In there the nearest questions are judged
one by one (:mod:`.likeness`): guards that refuse, and a learned score that has to reach what the error budget
asks for. Where spaces are made without the earlier turns, those are judged as well, turn by turn.

It learns in place (:mod:`.learning`): checks ask the model where the cache would have served, and compare.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import orjson

from ..errors import StoreError, UpstreamError
from ..events import Observer, SemanticChecked, SemanticLookedUp
from ..ports import Clock
from ..types import CacheControl
from .clerk import Clerk
from .embed.base import Embedder, normalized
from .exact import Form, id_of, key_of
from .learning import EntryRecord, SpaceRecord, read_entry, read_space, write
from .likeness.conversation import judge_answers, judge_chats
from .likeness.guards.moments import is_fresh
from .likeness.judge import Judge, Judgement, SecondJudge
from .likeness.risk import risk_of
from .likeness.words import parse
from .nearby import Nearby
from .stores.base import Entry, Kind, Store, Vector
from .timekeeper import Timekeeper

_log = logging.getLogger(__name__)

P = TypeVar("P")

_KIND: Final[Kind] = "semantic"
_MAX_CHARS: Final = 1200
"""Longer questions are more than the embedder reads."""
_MAX_SPACES: Final = 256
_SCAN: Final = 1024
_MAX_TRACES: Final = 4096
_SAME_ANSWER: Final = 0.9
_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SemanticSettings:
    """How it decides.

    ``num_candidates`` nearest questions are judged, of those as similar as ``min_similarity`` (cosine).
    ``check_share`` of what would be served asks the model instead, and compares. ``fresh_age_s``: how old an
    answer to a question of the moment ("latest", "today") may be. ``uncertain``: by how much (log-odds) a
    score may pass for the second judge to be asked.
    """

    num_candidates: int = 5
    min_similarity: float = 0.5
    check_share: float = 0.0
    fresh_age_s: float = 60.0
    uncertain: float = 1.5


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. ``key``: the exact cache's name of the whole request, so that forgetting an answer takes
    both. ``space``: a digest of everything that has to be equal, 32 bytes. ``earlier``: the turns before,
    where they are to be judged and are not part of ``space``; of user and assistant in turn.

    ``is_marked``: whoever asks wants no semantic answer to it.
    """

    key: bytes
    space: bytes
    text: str
    earlier: tuple[str, ...] = ()
    tenant: str = ""
    model: str = ""
    prompt: str = ""
    control: CacheControl = field(default_factory=CacheControl)
    ttl_s: float = inf
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class Match(Generic[P]):
    """A kept answer that serves, and how it was judged."""

    pieces: list[P]
    age_s: float
    entry_id: str
    matched: str
    judgement: Judgement

    def details(self) -> dict[str, Any]:
        """For whoever asked: plain values."""
        found = self.judgement
        guards = {verdict.guard: f"{verdict.opinion}: {verdict.reason}" for verdict in found.verdicts}
        return {
            "similarity": round(found.similarity, 4),
            "score": round(found.score, 4),
            "guards": guards,
            "matched": self.entry_id,
        }


@dataclass(frozen=True, slots=True)
class Sought(Generic[P]):
    """Nothing that serves: what is computed may be filed under it. ``reason`` says why nothing did.

    ``to_check``: what would have served, were it not for a check.
    """

    question: Question
    reason: str
    vector: Vector | None = None
    epoch: int | None = None
    to_check: Match[P] | None = None


class Semantic(Generic[P]):
    """Thread-safe.

    Args:
        store: where answers are; whoever made it closes it.
        form: what they consist of.
        judge: decides; with its error budget.
        clock: of it expiry and age.
        text_of: an answer as text, to compare two.
        settings: how it decides.
        embedder: what searches; ``None``: the vectors that the judge reads anyway.
        second: asked about what passes only just.
        ttl_s: for how long answers are kept at most.
        chance: draws from 0 to 1, for checks.
        folder: where indexes are written down between runs; ``None``: nowhere.
        observer: hears what becomes of questions.
    """

    def __init__(
        self,
        store: Store,
        form: Form[P],
        judge: Judge,
        clock: Clock,
        *,
        text_of: Callable[[Sequence[P]], str],
        chance: Callable[[], float],
        settings: SemanticSettings | None = None,
        embedder: Embedder | None = None,
        second: SecondJudge | None = None,
        ttl_s: float = inf,
        folder: Path | None = None,
        observer: Observer = lambda event: None,
    ) -> None:
        self._store, self._form, self._judge = store, form, judge
        self._settings = settings or SemanticSettings()
        self._embedder, self._second = embedder, second
        self._text_of, self._chance = text_of, chance
        self._ttl_s, self._folder, self._observe = ttl_s, folder, observer
        self._time = Timekeeper(clock)
        self.clerk = Clerk("ostinato-semantic")
        self._lock = threading.Lock()
        self._indexes: OrderedDict[bytes, Nearby] = OrderedDict()
        self._margins: OrderedDict[bytes, float] = OrderedDict()  # of what was served lately
        self._retry_at_s = -inf

    @property
    def identity(self) -> str:
        """Names what embeds and judges; a part of every space, as vectors of two embedders say nothing of
        each other."""
        return f"{self._judge.identity} {'' if self._embedder is None else self._embedder.identity}"

    # ------------------------------------------------------------ look up

    def find(self, question: Question) -> Match[P] | Sought[P]:
        """An answer that serves, or a place to file what is computed. Waits for embedder and store."""
        began_s = self._time.monotonic()
        found = self._find(question)
        reason = "served" if isinstance(found, Match) else found.reason.partition(":")[0]
        similarity = found.judgement.similarity if isinstance(found, Match) else 0.0
        self._observe(SemanticLookedUp(reason, self._time.monotonic() - began_s, similarity))
        return found

    def _find(self, question: Question) -> Match[P] | Sought[P]:
        if bypass := self._bypass(question):
            return Sought(question, bypass)
        try:
            vector = self._vector(question)
            epoch = self._store.epoch()
            space = self._space(question)
            nothing: Sought[P] = Sought(question, "nothing near", vector, epoch)
            if not question.control.read:
                return Sought(question, "asked for a new one", vector, epoch)
            if space.is_off:
                return Sought(question, "switched off", vector, epoch)
            found = self._best(question, vector, space)
        except StoreError as error:
            self._went_down(error)
            return Sought(question, "store failed")
        except UpstreamError as error:
            _log.warning("questions are not embedded: %s", error)
            return Sought(question, "embedder failed")
        if found is None:
            return nothing
        if isinstance(found, str):
            return Sought(question, found, vector, epoch)
        match, record = found
        if self._chance() < max(self._settings.check_share, record.chance_to_ask(self._judge.budget)):
            return Sought(question, "to be checked", vector, epoch, match)
        self._served(match)
        return match

    def _bypass(self, question: Question) -> str:
        """Why a question has no part in this at all; empty where it has."""
        if self._time.monotonic() < self._retry_at_s:
            return "store failed"
        if question.is_marked:
            return "marked"
        if not question.text.strip():
            return "no text"
        if len(question.text) > _MAX_CHARS:
            return "too long"
        topic = next((risk for text in (question.text, *question.earlier) if (risk := risk_of(text))), "")
        return f"high risk: {topic}" if topic else ""

    def _vector(self, question: Question) -> Vector:
        """Where to look: near the question, drawn a little to what came before where that is to be judged."""
        earlier = question.earlier[-2:]
        texts = [question.text, *earlier]
        if self._embedder is not None:
            rows = self._embedder.embed(texts)
        else:
            rows = np.stack([seen.vector for seen in self._judge.see(texts)])
        first: Vector = rows[0]
        return first if not earlier else normalized(0.6 * first + 0.4 * rows[1:].mean(axis=0))

    def _space(self, question: Question) -> SpaceRecord:
        entry = self._store.get("state", question.space, self._time.now_ms())
        return read_space(entry.meta) if isinstance(entry, Entry) else SpaceRecord()

    def _best(
        self, question: Question, vector: Vector, space: SpaceRecord
    ) -> tuple[Match[P], EntryRecord] | str | None:
        """The surest of the nearest that serve; else why the nearest did not."""
        now_ms = self._time.now_ms()
        why: str | None = None
        best: tuple[Entry, Judgement, str] | None = None
        found = self._near(question.space, vector, now_ms)
        near = [entry for entry, cosine in found if cosine >= self._settings.min_similarity]
        texts = [(entry, *_question_of(entry)) for entry in near]
        if not question.earlier:
            self._judge.see([question.text, *(text for _, text, _ in texts)])  # all in one pass
        for entry, text, earlier in texts:
            judgement = self._judged(question, entry, text, earlier, space, now_ms)
            if not judgement.is_same:
                why = why or judgement.refused_by
            elif best is None or judgement.margin > best[1].margin:
                best = entry, judgement, text
        if best is None:
            return why
        entry, judgement, text = best
        try:
            pieces = self._form.decode(_answer_of(entry))
        except ValueError:
            self.clerk.do(lambda: self._store.drop([entry.seq]))
            return "corrupt"
        age_s = max(0.0, (now_ms - entry.stored_ms) / 1000)
        return Match(pieces, age_s, id_of(entry.key), text, judgement), read_entry(entry.meta)

    def _judged(
        self,
        question: Question,
        entry: Entry,
        text: str,
        earlier: tuple[str, ...],
        space: SpaceRecord,
        now_ms: int,
    ) -> Judgement:
        record = read_entry(entry.meta)
        stricter = space.stricter + record.stricter
        age_s = max(0.0, (now_ms - entry.stored_ms) / 1000)
        max_age_s = question.control.max_age_s
        if max_age_s is not None and age_s >= max_age_s:
            return Judgement(False, 0.0, 0.0, 0.0, (), "too old")
        if age_s > self._settings.fresh_age_s and is_fresh(parse(question.text)):
            return Judgement(False, 0.0, 0.0, 0.0, (), "freshness: too old for a question of the moment")
        found = judge_chats(
            self._judge, (*question.earlier, question.text), (*earlier, text), stricter=stricter
        )
        if found.is_same and self._second is not None and found.margin < self._settings.uncertain:
            return self._asked_again(found, question.text, text)
        return found

    def _asked_again(self, found: Judgement, one: str, other: str) -> Judgement:
        assert self._second is not None, "nobody to ask"
        try:
            is_same = self._second.is_same(one, other)
        except Exception:  # noqa: BLE001 - whoever is plugged in may fail in any way; then the answer is no
            _log.exception("the second judge failed")
            is_same = False
        if is_same:
            return found
        return Judgement(False, found.similarity, found.score, found.margin, found.verdicts, "second judge")

    # ------------------------------------------------------------ neighbours

    def _near(self, space: bytes, vector: Vector, now_ms: int) -> list[tuple[Entry, float]]:
        num = self._settings.num_candidates
        if (found := self._store.nearest(_KIND, space, vector, num, now_ms)) is not None:
            return [(near.entry, near.similarity) for near in found]
        index = self._index(space, now_ms)
        hits = index.search(vector, num)
        entries = self._store.get_many(_KIND, [key for _, key, _ in hits], now_ms)
        gone = [seq for seq, key, _ in hits if key not in entries or entries[key].seq != seq]
        if gone:
            index.drop(gone)
            hits = index.search(vector, num)
            entries = self._store.get_many(_KIND, [key for _, key, _ in hits], now_ms)
        return [(entries[key], near) for _, key, near in hits if key in entries]

    def _index(self, space: bytes, now_ms: int) -> Nearby:
        """The space's index, with all that the store has by now."""
        with self._lock:
            index = self._indexes.get(space)
            if index is not None:
                self._indexes.move_to_end(space)
        if index is None:
            index = self._kept_index(space, now_ms)
            with self._lock:
                index = self._indexes.setdefault(space, index)
                while len(self._indexes) > _MAX_SPACES:
                    self._indexes.popitem(last=False)
        while True:
            entries = self._store.scan(_KIND, space, index.last_seq, _SCAN, now_ms)
            usable = [entry for entry in entries if entry.vector is not None]
            with self._lock:  # another thread may have added them meanwhile
                new = [entry for entry in usable if entry.seq > index.last_seq]
                vectors = np.stack([entry.vector for entry in new]) if new else None  # type: ignore[misc]
                if vectors is not None:
                    index.add([entry.seq for entry in new], [entry.key for entry in new], vectors)
            if len(entries) < _SCAN:
                return index

    def _kept_index(self, space: bytes, now_ms: int) -> Nearby:
        """What an earlier process wrote down of this space, if it is of this store; else an empty one."""
        if self._folder is not None and (found := Nearby.load(self._path(space))) is not None:
            last = found.last_key
            entry = None if last is None else self._store.get(_KIND, last, now_ms)
            if isinstance(entry, Entry) and entry.seq == found.last_seq:
                return found
        return Nearby()

    def _path(self, space: bytes) -> Path:
        assert self._folder is not None, "no place for indexes"
        return self._folder / f"{space.hex()}.index"

    # ------------------------------------------------------------ keep

    def file(self, sought: Sought[P], pieces: Sequence[P]) -> None:
        """Keeps the whole answer that was computed where nothing served. Does not wait."""
        if sought.to_check is None and (sought.epoch is None or not sought.question.control.store):
            return
        kept = list(pieces)
        self.clerk.do(lambda: self._file(sought, kept))

    def _file(self, sought: Sought[P], pieces: list[P]) -> None:
        question = sought.question
        try:
            if sought.to_check is not None:
                self._check(sought.to_check, pieces)
            if sought.epoch is None or sought.vector is None or not question.control.store:
                return
            now_ms = self._time.now_ms()
            ttl_s = min(self._ttl_s, question.ttl_s)
            entry = Entry(
                _KIND,
                question.key,
                question.space,
                _value(question, self._form.encode(pieces)),
                now_ms,
                None if ttl_s == inf else now_ms + max(1, int(ttl_s * 1000)),
                question.tenant,
                question.model,
                question.prompt,
                write(EntryRecord()),
                sought.vector,
            )
            self._store.put([entry], now_ms, sought.epoch)
        except ValueError:
            _log.debug("an answer that cannot be written down")
        except StoreError as error:
            self._went_down(error)

    def _check(self, match: Match[P], pieces: Sequence[P]) -> None:
        """Compares what would have been served with what was computed."""
        one, other = self._text_of(match.pieces), self._text_of(pieces)
        is_right = judge_answers(self._judge, one, other, min_similarity=_SAME_ANSWER).is_same
        self._observe(SemanticChecked("check", is_right))
        key = key_of(match.entry_id)
        assert key is not None, "an entry without a name"
        self._tell(key, is_right, match.judgement.margin)

    def _tell(self, key: bytes, is_right: bool, margin: float, tenant: str | None = None) -> bool:
        """Writes a check down: of the entry and of its space."""
        now_ms = self._time.now_ms()
        entry = self._store.get(_KIND, key, now_ms)
        if not isinstance(entry, Entry) or (tenant is not None and entry.tenant != tenant):
            return False
        self._store.update(_KIND, key, lambda meta: write(read_entry(meta).told(is_right, margin)), now_ms)
        space, budget = entry.space, self._judge.budget

        def change(meta: bytes) -> bytes:
            return write(read_space(meta).told(is_right, budget))

        if self._store.update("state", space, change, now_ms) is None:
            fresh = write(SpaceRecord().told(is_right, budget))
            state = Entry("state", space, space, b"", now_ms, None, entry.tenant, entry.model, meta=fresh)
            self._store.put([state], now_ms)
        return True

    def _served(self, match: Match[P]) -> None:
        """Remembers how sure it was, for feedback that names the answer only."""
        key = key_of(match.entry_id)
        assert key is not None, "an entry without a name"
        with self._lock:
            self._margins[key] = match.judgement.margin
            self._margins.move_to_end(key)
            while len(self._margins) > _MAX_TRACES:
                self._margins.popitem(last=False)

    def _went_down(self, error: StoreError) -> None:
        _log.warning("no semantic answers for %g s: %s", _RETRY_S, error)
        self._retry_at_s = self._time.monotonic() + _RETRY_S

    # ------------------------------------------------------------ operators

    def feedback(self, entry_id: str, is_good: bool, tenant: str | None = None) -> bool:
        """What somebody thought of an answer; false where there is no such entry (any more), or it is another
        tenant's (an id; ``None``: whoever may ask about all).

        Raises:
            StoreError: the store cannot be reached.
        """
        key = key_of(entry_id)
        if key is None:
            return False
        with self._lock:
            margin = self._margins.get(key, 0.0)
        is_known = self._tell(key, is_good, margin if np.isfinite(margin) else 0.0, tenant)
        if is_known:
            self._observe(SemanticChecked("feedback", is_good))
        return is_known

    def reset(self, space: bytes) -> None:
        """Forgets what was learned of a space; one that was switched off serves again.

        Raises:
            StoreError: the store cannot be reached.
        """
        self._store.update("state", space, lambda meta: write(SpaceRecord()), self._time.now_ms())

    def record(self, space: bytes) -> SpaceRecord:
        """What was learned of a space. Raises :class:`~ostinato.errors.StoreError`."""
        entry = self._store.get("state", space, self._time.now_ms())
        return read_space(entry.meta) if isinstance(entry, Entry) else SpaceRecord()

    def close(self) -> None:
        """Writes what waits to be written, and the indexes. The store stays open."""
        self.clerk.close()
        if self._folder is None:
            return
        with self._lock:
            indexes = dict(self._indexes)
        for space, index in indexes.items():
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                index.save(self._path(space))
            except OSError as error:
                _log.warning("an index is not kept, and will be made anew: %s", error)


def _value(question: Question, answer: bytes) -> bytes:
    head = orjson.dumps([question.text, list(question.earlier)])
    return len(head).to_bytes(4, "little") + head + answer


def _question_of(entry: Entry) -> tuple[str, tuple[str, ...]]:
    """An entry's question and the turns before it. What is no such thing is a question that nobody asks."""
    try:
        size = int.from_bytes(entry.value[:4], "little")
        text, earlier = orjson.loads(entry.value[4 : 4 + size])
        return str(text), tuple(map(str, earlier))
    except (orjson.JSONDecodeError, TypeError, ValueError):
        return "", ()


def _answer_of(entry: Entry) -> bytes:
    return entry.value[4 + int.from_bytes(entry.value[:4], "little") :]
