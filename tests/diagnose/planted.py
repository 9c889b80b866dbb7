"""Logs with one fault planted in each, and logs with none: rows as a file of JSON lines would have them."""

from __future__ import annotations

import copy
import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
Log = list[Row]

RULES = [
    "Answer in two sentences or fewer, and in the language that the customer writes in.",
    "Cite the article of the knowledge base you relied on, in square brackets after the sentence.",
    "Never speculate about delivery dates that you cannot verify from the order record.",
    "If the customer is angry, acknowledge the frustration before you answer the question itself.",
    "Escalate to a human colleague when somebody asks for a refund above five hundred euros.",
    "Do not disclose internal names of systems, nor the rules by which tickets are routed.",
    "Refer to the returns policy whenever anybody asks how a refund is paid and how long it takes.",
    "Warranty questions about café machines, résumé printers and naïve gadgets go to the second line.",
    "Prices are in euros, taxes included, and shipping is free for orders above fifty euros.",
    "Close every conversation with an offer to help with anything else that may be open.",
]
SYSTEM = "You are the support assistant of Acme.\n" + "\n".join(f"- {rule}" for rule in RULES)
QUESTIONS = [
    "Where is my parcel?",
    "How do I send something back that does not fit?",
    "The kettle arrived broken, what now?",
    "Can the address still be changed?",
    "Why was my card charged twice?",
    "Is express delivery possible to the islands?",
    "I would like to cancel what I ordered yesterday evening.",
    "When will the money be back in my account?",
]
ANSWERS = [
    "It left our warehouse this morning and the carrier has it now.",
    "Print the label from your account and bring the box to any shop of the carrier.",
    "I am sorry about that; we send a new one today and you keep the broken one.",
    "Yes, as long as it has not left the warehouse, which takes about a day.",
    "The second charge is a reservation that your bank removes within three days.",
    "It is, for seven euros more, and takes two days instead of five.",
    "Done, and you get a confirmation by mail within the next few minutes.",
    "Within five working days after the parcel has come back to us.",
]
DOCUMENTS = [
    " ".join(
        f"Paragraph {topic}{n} of the handbook says how {topic} is handled in case {n} and why."
        for n in range(6)
    )
    for topic in ("returns", "shipping", "warranty", "billing", "privacy", "accounts", "outlets", "repairs")
]


def tool(name: str, **extra: Any) -> Row:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {name} by its number and returns what is known of it, newest first.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "string"}},
                "required": ["number"],
            },
            **extra,
        },
    }


TOOLS = [tool(name) for name in ("orders", "parcels", "refunds", "customers")]


def one_shots(system: Callable[[int], str] = lambda n: SYSTEM, count: int = 8, **body: Any) -> Log:
    return [
        {
            "messages": [
                {"role": "system", "content": system(n)},
                {"role": "user", "content": QUESTIONS[n % len(QUESTIONS)]},
            ],
            **copy.deepcopy(body),
        }
        for n in range(count)
    ]


def chat(turns: int = 6, session: str = "", system: str | None = SYSTEM, **body: Any) -> Log:
    messages: list[Row] = [] if system is None else [{"role": "system", "content": system}]
    log: Log = []
    for n in range(turns):
        messages = [*messages, {"role": "user", "content": QUESTIONS[n]}]
        log.append({"messages": copy.deepcopy(messages), **({"session": session} if session else {}), **body})
        messages = [*messages, {"role": "assistant", "content": ANSWERS[n]}]
    return log


def agent(turns: int = 6, result: Callable[[int], str] = lambda n: DOCUMENTS[n], **body: Any) -> Log:
    messages: list[Row] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Find out what happened to the order and tell me."},
    ]
    log: Log = []
    for n in range(turns):
        log.append({"messages": copy.deepcopy(messages), "tools": TOOLS, "session": "a", **body})
        values = json.dumps({"number": str(n), "deep": True})
        call = {"id": f"call_{n}aa", "type": "function", "function": {"name": "orders", "arguments": values}}
        messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": f"call_{n}aa", "content": result(n)}]  # fmt: skip
    return log


def hexes(n: int, length: int) -> str:
    return f"{random.Random(n).getrandbits(4 * length):0{length}x}"


def uuid(n: int) -> str:
    text = hexes(n, 32)
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def with_usage(log: Log, cached: Callable[[int], int], total: int = 2000) -> Log:
    for n, row in enumerate(log):
        details = {"cached_tokens": cached(n)}
        row["usage"] = {"prompt_tokens": total, "completion_tokens": 9, "prompt_tokens_details": details}
    return log


def traced(
    log: Log, *, cached: int, why: str, evicted: dict[str, int] | None = None, gap_s: float = 5.0
) -> Log:
    """As our own server would have written them down: all but the first found ``cached`` tokens."""
    return [
        {
            "v": 1, "timestamp": 1764544000000 + int(1000 * gap_s * n), "id": f"r{n}",
            "request": row, "salt": "",
            "input_length": 300, "output_length": 9, "cached_tokens": cached if n else 0, "written_tokens": 9,
            "ttft_s": 0.4, "total_s": 0.9, "block_tokens": 16, "hash_ids": list(range(19)),
            "stop": {"at": cached if n else 0, "why": why if n else "unseen"},
            **({"evicted": evicted} if evicted else {}),
        }
        for n, row in enumerate(log)
    ]  # fmt: skip


def shuffled(items: list[Any], n: int) -> list[Any]:
    items = list(items)
    random.Random(n).shuffle(items)
    return items


# ---------------------------------------------------------------- faults


def planted() -> Iterator[tuple[str, str, Log]]:
    """Name, kind of the fault, and a log that has it."""
    yield from _volatile()
    yield from _forms()
    yield from _orders()
    yield from _contents()
    yield from _histories()
    yield from _running()


def _volatile() -> Iterator[tuple[str, str, Log]]:
    head = "timestamp"
    yield "iso time", head, one_shots(lambda n: f"Current time: 2026-09-11T08:{n:02}:00Z\n{SYSTEM}")
    yield "date in words", head, one_shots(lambda n: f"Today is October {n + 3}, 2026.\n{SYSTEM}")
    yield "clock", head, one_shots(lambda n: f"It is {n + 1}:15 PM now.\n{SYSTEM}")
    yield "epoch", head, one_shots(lambda n: f"now={1764544000 + 61 * n}\n{SYSTEM}")
    yield (
        "time in the middle",
        head,
        one_shots(lambda n: SYSTEM.replace("- Prices", f"(as of 2026-0{n + 1}-01)\n- Prices")),
    )
    yield (
        "time in a text",
        head,
        [{"prompt": f"Report of 2026-11-{n + 10} 09:00\n{SYSTEM}\n{QUESTIONS[n]}"} for n in range(8)],
    )
    yield "uuid", "uuid", one_shots(lambda n: f"Conversation {uuid(n)}\n{SYSTEM}")
    yield "uuid in a text", "uuid", [{"prompt": f"[{uuid(n)}]\n{SYSTEM}\n{QUESTIONS[n]}"} for n in range(8)]
    yield "request id", "id", one_shots(lambda n: f"Request id: req_{hexes(n, 10)}f3\n{SYSTEM}")
    yield "trace id", "id", one_shots(lambda n: f"trace {hexes(n, 32)}\n{SYSTEM}")
    yield (
        "time in a tool",
        "timestamp",
        one_shots(lambda n: SYSTEM, tools=TOOLS)
        and [
            {
                **row,
                "tools": [
                    tool("orders", description=f"Orders as of 2026-09-{n + 10}T00:00:00Z."),
                    *TOOLS[1:],
                ],
            }
            for n, row in enumerate(one_shots())
        ],
    )


def _forms() -> Iterator[tuple[str, str, Log]]:
    numbers = ("1,250,000", "1250000", "1.250.000", "1 250 000")
    yield (
        "number format",
        "number_format",
        one_shots(lambda n: f"We have {numbers[n % 4]} customers.\n{SYSTEM}"),
    )
    yield "spaces", "whitespace", one_shots(lambda n: f"Support.{' ' * (n % 3 + 1)}Be kind.\n{SYSTEM}")
    yield "line breaks", "whitespace", one_shots(lambda n: "Support." + "\n" * (n % 3 + 1) + SYSTEM)
    yield (
        "carriage returns",
        "whitespace",
        one_shots(lambda n: f"Support.\r\n{SYSTEM}" if n % 2 else f"Support.\n{SYSTEM}"),
    )
    yield (
        "trailing spaces",
        "whitespace",
        one_shots(lambda n: SYSTEM.replace("Acme.\n", "Acme." + " " * (n % 4) + "\n")),
    )
    yield "tabs", "whitespace", one_shots(lambda n: f"Rules:\n{chr(9) if n % 2 else '    '}first\n{SYSTEM}")
    yield (
        "unicode form",
        "unicode",
        one_shots(
            lambda n: (
                unicodedata.normalize("NFD" if n % 2 else "NFC", "Grüße aus Köln, naïve Freunde.")
                + f"\n{SYSTEM}"
            )
        ),
    )
    yield "case", "case", one_shots(lambda n: ("SUPPORT DESK" if n % 2 else "Support Desk") + f"\n{SYSTEM}")
    yield (
        "key order in text",
        "key_order",
        one_shots(
            lambda n: (
                json.dumps(dict(shuffled([("plan", "gold"), ("region", "north"), ("tier", "two")], n)))
                + f"\n{SYSTEM}"
            )
        ),
    )


def _orders() -> Iterator[tuple[str, str, Log]]:
    yield (
        "tool order",
        "tool_order",
        [{**row, "tools": shuffled(TOOLS, n)} for n, row in enumerate(one_shots())],
    )
    yield (
        "two tools swapped",
        "tool_order",
        [{**row, "tools": TOOLS[:2] if n % 2 else TOOLS[1::-1]} for n, row in enumerate(one_shots())],
    )
    yield (
        "tool key order",
        "key_order",
        [
            {
                **row,
                "tools": [
                    {"type": "function", "function": dict(shuffled(list(each["function"].items()), n))}
                    for each in TOOLS
                ],
            }
            for n, row in enumerate(one_shots())
        ],
    )
    yield (
        "list order",
        "order",
        one_shots(
            lambda n: (
                "Shops: "
                + ", ".join(shuffled(["Berlin", "Lyon", "Porto", "Turin", "Ghent"], n))
                + f".\n{SYSTEM}"
            )
        ),
    )
    yield (
        "rules shuffled",
        "order",
        one_shots(
            lambda n: (
                "You are the support assistant of Acme.\n"
                + "\n".join(shuffled(RULES, n))
                + "\n"
                + DOCUMENTS[0]
            )
        ),
    )
    yield (
        "documents shuffled",
        "order",
        one_shots(lambda n: "Use the documents.\n\n" + "\n\n".join(shuffled(DOCUMENTS[:4], n))),
    )
    yield (
        "examples shuffled",
        "order",
        one_shots(
            lambda n: (
                "Examples:\n"
                + "\n".join(shuffled([f"Q: {q} A: {a}" for q, a in zip(QUESTIONS, ANSWERS, strict=True)], n))
                + f"\n{SYSTEM}"
            )
        ),
    )


def _contents() -> Iterator[tuple[str, str, Log]]:
    names = ["jane", "joe", "ann", "bob", "eve", "kim", "lee", "sam"]
    towns = ["Lyon", "Porto", "Ghent", "Turin", "Basel", "Graz", "Cork", "Bonn"]
    moods = ["cheerful", "formal", "short", "warm", "plain", "witty", "calm", "dry"]
    yield "mail address", "user_data", one_shots(lambda n: f"user: {names[n]}@example.org\n{SYSTEM}")
    yield "user's name", "user_data", one_shots(lambda n: f"Customer name: {names[n].title()}\n{SYSTEM}")
    yield "place", "user_data", one_shots(lambda n: f"Location: {towns[n]}\n{SYSTEM}")
    yield "persona", "system_text", one_shots(lambda n: f"Be {moods[n]} today, as is our custom.\n{SYSTEM}")
    yield (
        "tools by turn",
        "tools_changed",
        [
            {**row, "tools": [each for k, each in enumerate(TOOLS) if (n + 5) >> k & 1]}
            for n, row in enumerate(one_shots())
        ],
    )
    yield (
        "question before documents",
        "content",
        [
            {
                "messages": [
                    {"role": "user", "content": f"{QUESTIONS[n]}\n\nHandbook:\n" + "\n".join(DOCUMENTS[:4])}
                ]
            }
            for n in range(8)
        ],
    )
    yield (
        "model changes",
        "model",
        [{**row, "model": ("large", "small")[n % 2]} for n, row in enumerate(chat(session="c"))],
    )
    yield (
        "tool choice",
        "parameter",
        [{**row, "tools": TOOLS, "tool_choice": ("auto", "required")[n % 2]} for n, row in enumerate(chat())],
    )
    yield (
        "thinking",
        "parameter",
        [{**row, "thinking": {"type": ("enabled", "disabled")[n % 2]}} for n, row in enumerate(chat())],
    )
    yield (
        "salt of a request",
        "salt",
        [{**row, "cache_salt": hexes(n, 8)} for n, row in enumerate(one_shots())],
    )


def _histories() -> Iterator[tuple[str, str, Log]]:
    def window(row: Row) -> Row:
        head, rest = row["messages"][:1], row["messages"][1:]
        return {**row, "messages": [*head, *rest[-5:]]}

    talk = chat(8, session="w")
    for row in talk:
        for n, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                message["content"] = DOCUMENTS[(n // 2) % 8] + ANSWERS[0]
    yield "sliding window", "history_dropped", [window(row) for row in talk]
    edited = agent()
    for n, row in enumerate(edited):
        for message in row["messages"][:-2]:
            if message["role"] == "tool" and n >= 2:
                message["content"] = message["content"][: 300 - 30 * n] + " [cut]"
    yield "results cut", "history_edited", edited
    thought = chat(6, session="t")
    for row in thought:
        said = [m for m in row["messages"] if m["role"] == "assistant"]
        for message in said[-1:]:
            message["reasoning_content"] = (
                "The customer wants to know this, so I look it up and say it kindly."
            )
        for n, message in enumerate(row["messages"]):
            if message["role"] == "user":
                message["content"] += " " + DOCUMENTS[n // 2]
    yield "reasoning dropped", "reasoning_dropped", thought
    calls = agent()
    for n, row in enumerate(calls):
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                values = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(dict(sorted(values.items(), reverse=n % 2 > 0)))
    yield "arguments' key order", "key_order", calls


def _running() -> Iterator[tuple[str, str, Log]]:
    yield "cache off", "cache_off", with_usage(one_shots(), lambda n: 0)
    yield "cache off, own trace", "cache_off", traced(one_shots(), cached=0, why="unknown")
    yield (
        "capacity",
        "capacity",
        traced(one_shots(), cached=16, why="gone", evicted={"capacity": 900, "expired": 10}),
    )
    yield "quota", "quota", traced(one_shots(), cached=16, why="gone", evicted={"quota": 900})
    yield "expired", "ttl_gap", traced(one_shots(), cached=16, why="gone", evicted={"expired": 900})
    yield "purged", "purged", traced(one_shots(), cached=16, why="gone", evicted={"purged": 900})
    yield "fan-out", "fan_out", traced(one_shots(), cached=16, why="pending", gap_s=0.01)
    yield "restart", "restart", traced(one_shots(), cached=16, why="unknown")
    long = SYSTEM + "\n" + "\n".join(DOCUMENTS) + "\n" + "\n".join(DOCUMENTS)
    marked = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]

    def claude(gap_s: float, *, cached: int = 0, system: Any = marked, blocks: int = 0) -> Log:
        rows: Log = []
        for n in range(8):
            turn: list[Row] = [{"type": "text", "text": QUESTIONS[n]}]
            turn += [{"type": "text", "text": f"Point {k} of turn {n}."} for k in range(blocks)]
            before = rows[-1]["messages"] if rows and blocks else []
            answer = [{"role": "assistant", "content": "Fine."}] if before else []
            rows.append({
                "model": "claude-sonnet-4-5", "system": system, "timestamp": 1764544000 + gap_s * n,
                "messages": [*before, *answer, {"role": "user", "content": turn}],
                "max_tokens": 9, "output": "x",
                "usage": {"input_tokens": 2000, "cache_read_input_tokens": cached if n else 0,
                          "cache_creation_input_tokens": 0, "output_tokens": 9},
            })  # fmt: skip
        return rows

    def bare(log: Log) -> Log:
        return [{name: value for name, value in row.items() if name != "usage"} for row in log]

    yield "vendor's time to live", "ttl_gap", claude(900)
    yield "no breakpoint", "no_breakpoint", claude(30, system=long)
    yield "prefix too short", "short_prefix", claude(30, system=[{**marked[0], "text": SYSTEM}])
    yield (
        "time behind a long text",
        "timestamp",
        [
            {**row, "system": [{**marked[0], "text": f"{long}\nTime: 2026-09-20T10:1{n}"}]}
            for n, row in enumerate(bare(claude(30)))
        ],
    )
    yield (
        "breakpoint behind the question only",
        "no_breakpoint",
        [
            {
                **row,
                "system": long,
                "messages": [{"role": "user", "content": [{**marked[0], "text": QUESTIONS[n]}]}],
            }
            for n, row in enumerate(bare(claude(30)))
        ],
    )
    yield "no breakpoint, not measured", "no_breakpoint", bare(claude(30, system=long))
    yield (
        "key without the model",
        "key_without_identity",
        [
            {**row, "model": ("large", "small")[n % 2], **({"served": "exact"} if n else {})}
            for n, row in enumerate(one_shots(count=1) * 2)
        ],
    )
    yield (
        "key without the temperature",
        "key_without_identity",
        [
            {**row, "temperature": n / 2, **({"served": "exact"} if n else {})}
            for n, row in enumerate(one_shots(count=1) * 2)
        ],
    )
    yield "look-back", "look_back", claude(30, cached=100, blocks=25)
    burst = claude(0.1)
    for row in burst:
        del row["output"]
    yield "vendor's fan-out", "fan_out", burst


# ---------------------------------------------------------------- nothing wrong


def healthy() -> Iterator[tuple[str, Log]]:
    """Logs in which nothing is to be mended."""
    yield "chat", chat(8)
    yield "chat without system text", chat(8, system=None)
    yield "questions with one system text", one_shots()
    yield (
        "questions with times in them",
        [
            {
                "messages": [
                    row["messages"][0],
                    {"role": "user", "content": f"On 2026-10-{n + 10} at 10:15 I ordered, why?"},
                ]
            }
            for n, row in enumerate(one_shots())
        ],
    )
    yield (
        "questions with ids in them",
        [
            {
                "messages": [
                    row["messages"][0],
                    {"role": "user", "content": f"Where is order ord_{hexes(n, 12)}1?"},
                ]
            }
            for n, row in enumerate(one_shots())
        ],
    )
    yield (
        "questions with mail addresses",
        [
            {
                "messages": [
                    row["messages"][0],
                    {"role": "user", "content": f"user: kim{n}@example.org\nWho am I?"},
                ]
            }
            for n, row in enumerate(one_shots())
        ],
    )
    yield "agent", agent()
    yield (
        "agent with times in results",
        agent(result=lambda n: f"2026-09-{n + 10}T10:00:00Z {uuid(n)} {DOCUMENTS[n]}"),
    )
    texts: Log = []
    text = SYSTEM
    for n in range(8):
        text += f"\nuser: {QUESTIONS[n]}"
        texts.append(
            {
                "input": text,
                "output": ANSWERS[n],
                "session_id": "s",
                "timestamp": 1760428503399051 + n * 10**7,
            }
        )
        text += f"\nassistant: {ANSWERS[n]}"
    yield "recorded session", texts
    yield "other documents each time", [
        {"messages": [row["messages"][0],
                      {"role": "user", "content": f"<document>{DOCUMENTS[n]}</document>\n{QUESTIONS[n]}"}]}
        for n, row in enumerate(one_shots())
    ]  # fmt: skip
    yield "documents and a closing word", [
        {"messages": [row["messages"][0],
                      {"role": "user", "content": f"{DOCUMENTS[n]}\n{QUESTIONS[n]}\nUse it alone."}]}
        for n, row in enumerate(one_shots())
    ]  # fmt: skip
    yield (
        "two tenants",
        [{**row, "cache_salt": ("one", "two")[n % 2]} for n, row in enumerate(one_shots(count=12))],
    )
    yield (
        "two models",
        [{**row, "model": "large"} for row in chat(session="x")]
        + [{**row, "model": "small"} for row in chat(session="y")],
    )
    a, b = chat(session="p"), chat(session="q", system=DOCUMENTS[0])
    yield "two conversations at once", [row for pair in zip(a, b, strict=True) for row in pair]
    yield "the same again", [one_shots(count=1)[0]] * 6
    yield (
        "answers kept",
        [{**row, "served": "exact"} if n else row for n, row in enumerate(one_shots(count=1) * 3)],
    )
    yield (
        "sampled otherwise",
        [{**row, "temperature": n / 10, "seed": n} for n, row in enumerate(one_shots())],
    )
    shared: Log = [{"conversations": [
        {"from": "system", "value": SYSTEM},
        *({"from": ("human", "gpt")[k % 2], "value": (QUESTIONS, ANSWERS)[k % 2][k // 2]} for k in range(10)),
    ]}]  # fmt: skip
    yield "ShareGPT", shared
    yield "nothing alike", [{"prompt": f"{DOCUMENTS[n]} {QUESTIONS[n]}"} for n in range(8)]
    yield (
        "two kinds of agents",
        agent() + [{**row, "tools": [tool("weather"), tool("trains")], "session": "b"} for row in agent(4)],
    )
    yield "tool added behind the others' end", [{**row, "tools": TOOLS} for row in chat()]
    yield "measured and well", with_usage(one_shots(), lambda n: 1900 if n else 0)
    yield "own trace and well", traced(one_shots(), cached=285, why="end")
    talk = chat(8, model="claude-sonnet-4-5")
    for row in talk:
        long = "\n".join([SYSTEM, *DOCUMENTS])
        row["system"] = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]
        row["messages"] = row["messages"][1:]
        newest = row["messages"][-1]
        newest["content"] = [
            {"type": "text", "text": newest["content"], "cache_control": {"type": "ephemeral"}}
        ]
    yield "a vendor's chat with moving breakpoints", talk
    yield (
        "ids of tokens",
        [{"prompt": list(range(500, 900)) + list(range(1000, 1000 + 40 * n))} for n in range(8)],
    )
