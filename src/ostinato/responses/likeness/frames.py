"""What a question asks for: a way, a reason, a time, a number of something, yes or no, a text to be written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from .lexicon import words_in

Asks: TypeAlias = Literal[
    "how", "why", "when", "where", "who", "quantity", "yes_no", "write", "compare", "what", "command", "none"
]

_POLITE: Final = re.compile(
    r"^(?:(?:hi|hello|hey|please|kindly|thanks|thank you|so|well|just|quick question|excuse me|sorry|and|but|then|also)"
    r" |(?:could|can|would|will) you (?:please |kindly |maybe )?(?:tell|show|explain|help|give|advise|say)"
    r"(?: to)?(?: me| us)?(?: with| to)? "
    r"|(?:could|can|would|will) you (?:please |kindly )?"
    r"|i (?:would|want|need|wish|have)(?: like)? (?:to )?(?:know|learn|understand|find out|ask|a question) "
    r"|i would like to know |i want to know |i am (?:wondering|asking|curious) (?:if |whether |about )?"
    r"|i was wondering (?:if |whether )?|do you know |any idea |tell me |let me know |explain to me |show me "
    r"|i need help with |help me )+"
)
_PATTERNS: Final[tuple[tuple[Asks, str, str], ...]] = (
    ("compare", "", r"\b(?:what is the |explain the |tell me the )?difference between\b|\bhow (?:do|does) .{0,60} differ\b"
     r"|\bcompare\b|\bversus\b|\bvs\b"),
    ("write", "", r"^(?:write|compose|draft|create|generate|invent|make up|come up with|make|give)(?: me| us)?"
     r"(?: (?:a|an|some|my|the|short|long|brief|new|funny|formal|little|birthday|nice))*"
     r" (?:\w+ ){0,2}(?:poem|story|song|letter|email|essay|speech|play|joke|haiku|text|post|ending|lyrics|tale|"
     r"dialogue|article|limerick|slogan|toast|script|message|note|card|caption|tweet|sonnet|review|reply)\b"
     r"|^(?:i (?:would like|want|need) )?(?:a|an|some) (?:\w+ ){0,3}(?:poem|story|song|essay|speech|joke|haiku|limerick)\b"),
    ("why", "", r"\bwhy\b|\bhow come\b|\bwhat (?:is|are|was|were) the (?:\w+ )?(?:reason|reasons)\b"
     r"|\bwhat (?:causes|caused|made|makes|led|could be the cause)\b|\bfor what reason\b"),
    ("quantity", "money", r"\bhow much (?:does|do|is|are|was|would|will|did) .{0,80}(?:cost|costs|charge|price|worth)\b"
     r"|\bwhat (?:does|do|did|would|will) .{0,60} cost\b|\b(?:price|cost|fee|fees) (?:of|for)\b|\bhow expensive\b"
     r"|\bwhat (?:do|does|must|should) (?:i|you|one) pay\b|\bis the (?:\w+ )?(?:price|cost|fee|charge)\b"
     r"|\bhow much (?:do|does|must|should) (?:i|you|one) (?:have to )?pay\b|\bhow much (?:is|are) (?:a|an|the)\b"),
    ("quantity", "duration", r"\bhow long (?:does|do|did|will|would|should|can|must|is|are|it)\b|\bhow long\b"
     r"|\bhow many (?:more )?(?:seconds|minutes|hours|days|weeks|months|years) (?:until|till|does|do|did|will|should|must)\b"
     r"|\bhow much time\b|\bfor how many (?:minutes|hours|days|weeks|months|years)\b"
     r"|\b(?:cooking|delivery|waiting|travel|processing|baking|storage) time\b|\bhow (?:soon|quickly)\b"),
    ("quantity", "frequency", r"\bhow (?:often|frequently|regularly)\b|\bhow many times\b|\bafter how long\b"),
    ("quantity", "age", r"\b(?:at|from) (?:what|which) age\b|\bhow old\b|\btypical age\b|\b(?:legal|minimum) (?:\w+ )?age\b"),
    ("quantity", "distance", r"\bhow far\b|\b(?:is the|what) distance\b|\bhow many (?:kilometers|kilometres|miles|km)\b"),
    ("quantity", "height", r"\bhow (?:tall|high)\b|\bis the (?:height|elevation|altitude)\b|\b(?:height|elevation) of\b"),
    ("quantity", "speed", r"\bhow fast\b|\b(?:at )?what speed\b|\bis the speed\b"),
    ("quantity", "heat", r"\bhow (?:hot|cold|warm)\b|\b(?:at )?(?:what|which) (?:\w+ )?temperature\b|\bis the (?:\w+ )?temperature\b"),
    ("quantity", "size", r"\bhow (?:big|large|wide|deep|heavy|thick|small)\b|\b(?:what|which) (?:\w+ )?size\b"),
    ("quantity", "count", r"\bhow (?:many|much)\b|\b(?:number|amount|quantity) of\b|\bthe calorie count\b"),
    ("when", "", r"(?:^|\b(?:and|know|but|from|until|since|about) )when\b|^.{0,40}: when\b|\b(?:in |on |at |from )?(?:what|which) (?:\w+ )?(?:year|date|day|month|hour|season|time of)\b"
     r"|\bis the (?:best |right |\w+ )?(?:date|time to|time of|season)\b|\bat what time\b|\bthe date\b"),
    ("how", "", r"\bwhere (?:do|can|could|should|would|may) i (?:\w+ )?(?:change|set|enable|disable|install|activate|"
     r"add|remove|create|delete|see|view|check|switch|update|edit|configure|reset|manage|track|cancel|download)\b"),
    ("where", "", r"\bwhere\b|\bin (?:which|what) (?:place|city|country|town|room|folder)\b"),
    ("who", "", r"\bwho\b|\bwhom\b|\bwhose\b|\b(?:what|which) (?:person|man|woman|actor|actress|writer|author|painter|"
     r"artist|scientist|player|singer)\b|\bis the (?:author|president|inventor|director|founder|ceo) of\b"),
    ("how", "", r"\bhow (?:do|does|can|could|should|would|must|may|might|to|did|is|are|was|were|am|will|best)\b"
     r"|\bwhat (?:is|are|would be|was) (?:the |a |an |some )?(?:\w+ )?(?:way|ways|step|steps|process|procedure|method|"
     r"methods|trick|approach|formula|technique)\b(?: to| for| of| that)?"
     r"|\bwhat (?:\w+ )?(?:command|sql|setting|keys?)\b"
     r"|\b(?:steps|guide|tips|instructions|directions|ways|methods|procedure|tutorial) (?:to|for|on|of|about)\b"
     r"|\bwhat (?:do|should|must|can) i (?:have to |need to )?(?:do|press)\b|\bwhat (?:helps|gets)\b|\bby what process\b"
     r"|\bis there (?:a|any|an easy|a simple|a good|a quick) (?:way|method|trick)\b(?: to| of| for)?|\bhow\b"),
    ("yes_no", "", r"^(?:is|are|was|were|do|does|did|can|could|may|might|must|should|will|would|has|have|am|shall|need)\b"
     r"|\bis it (?:ok|okay|possible|safe|legal|allowed|permitted|true|fine)\b"),
    ("what", "", r"\bwhat\b|\bwhich\b|^(?:name|list)\b"),
    ("command", "", r"^(?:summarize|translate|convert|calculate|compute|explain|describe|define|show|give|tell|find|restart|"
     r"stop|start|delete|create|set|increase|decrease|book|order|send|add|remove|turn|enable|disable|open|close|play|"
     r"schedule|remind|call|track|change|update|fix|correct|install|recommend|suggest|solve|analyze|write|make)\b"),
)  # fmt: skip
_COMPILED: Final = tuple((asks, of, re.compile(pattern)) for asks, of, pattern in _PATTERNS)

_FRAME_WORDS: Final = words_in(
    "how why when where who whom whose what which is are was were do does did can could should "
    "would must may might to will the a an of for way ways step steps process procedure method "
    "methods trick approach technique best right easiest correct proper quickest good come "
    "reason reasons time year date day month hour many much far often there in on at by from i "
    "you have need name list tell me please explain describe tips guide instructions directions "
    "using possible some any frequently soon quickly command number amount quantity it"
)

CONFLICTS: Final[frozenset[frozenset[str]]] = frozenset(
    frozenset(pair)
    for pair in (
        *(("how", other) for other in ("why", "when", "who", "where", "quantity", "write")),
        *(("why", other) for other in ("what", "when", "where", "who", "quantity", "write", "compare")),
        *(("when", other) for other in ("where", "who", "write", "yes_no", "compare")),
        *(("where", other) for other in ("who", "quantity", "write", "yes_no", "compare")),
        *(("who", other) for other in ("quantity", "write", "yes_no", "compare")),
        *(("write", other) for other in ("what", "quantity", "yes_no", "compare", "none")),
        ("quantity", "yes_no"),
        ("how", "yes_no"),
        ("why", "yes_no"),
    )
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What is asked for. ``of`` is the kind of quantity; ``places`` the words that say so and nothing else."""

    asks: Asks
    of: str
    places: frozenset[int]

    def is_at_odds(self, other: Frame) -> bool:
        """Whether no answer to the one answers the other."""
        if self.asks == other.asks:
            return self.asks == "quantity" and self.of != other.of and "count" not in (self.of, other.of)
        return frozenset((self.asks, other.asks)) in CONFLICTS


def find_frame(words: Sequence[str]) -> Frame:
    """The frame of a text given as words in lower case."""
    starts, at = [], 0
    for word in words:
        starts.append(at)
        at += len(word) + 1
    text = " ".join(words) + " "
    polite = _POLITE.match(text)
    begin = polite.end() if polite else 0
    rest = text[begin:]
    places = {place for place, start in enumerate(starts) if start < begin}
    for asks, of, pattern in _COMPILED:
        if (found := pattern.search(rest)) is None:
            continue
        first, last = begin + found.start(), begin + found.end()
        span = {
            place
            for place, start in enumerate(starts)
            if first <= start < last and words[place] in _FRAME_WORDS
        }
        return Frame(asks, of, frozenset(places | span))
    return Frame("none", "", frozenset(places))
