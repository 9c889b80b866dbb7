"""What the holder of the admin key can do: purge, pin, unpin, warm. Each is shown once before it is done."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

from starlette.exceptions import HTTPException

from ...errors import ParameterError
from ...types import GenerationRequest
from ..admin import AdminDoor, PinRequest, PurgeRequest
from ..fields import validate
from . import formats
from .recent import RecentRequests
from .sources import Inside

_NAMES: Final = {"purge": "Purge", "pin": "Pin", "unpin": "Unpin", "warm": "Warm"}


class Actions:
    """Takes a form's fields, and says what would be done or, once ``confirmed``, what was."""

    def __init__(self, admin: AdminDoor, inside: Inside, recent: RecentRequests) -> None:
        self._admin = admin
        self._inside = inside
        self._recent = recent

    async def act(self, name: str, fields: dict[str, str]) -> dict[str, Any]:
        """Values for ``action.html``.

        Raises:
            ClientError: what is wrong with the fields, or why it is refused.
            HTTPException: there is no such action.
        """
        known = {"purge": self._purge, "pin": self._pin, "unpin": self._unpin, "warm": self._warm}.get(name)
        if known is None:
            raise HTTPException(404, "There is no such action.")
        is_confirmed = fields.pop("confirmed", "") == "yes"
        said = await known(fields, is_confirmed)
        return {
            "action": name,
            "action_name": _NAMES[name],
            "is_done": is_confirmed,
            "is_dangerous": name == "purge",
            "fields": fields,
            "said": said,
        }

    async def _purge(self, fields: dict[str, str], is_confirmed: bool) -> list[str]:
        given: dict[str, Any] = {
            name: fields[name] for name in ("tenant", "prompt_name", "cache_salt") if name in fields
        }
        if "older_than_min" in fields:
            given["older_than_s"] = _number(fields, "older_than_min") * 60
        if fields.get("everything") == "yes":
            given["all"] = True
        request = validate(PurgeRequest, given)
        self._admin.selection(request)
        if not is_confirmed:
            return [_meant(given), "It is computed again when it is asked for. This cannot be undone."]
        report, removed = await self._admin.do_purge(request)
        said = [
            f"{formats.number(report.arena.num_tokens)} tokens can no longer be found; "
            f"{formats.size(report.freed_bytes)} are free again."
        ]
        if report.arena.num_held_blocks:
            said.append(
                f"{report.arena.num_held_blocks} blocks are in use and follow when they no longer are."
            )
        if report.num_tier_blocks:
            said.append(f"{report.num_tier_blocks} blocks went from the shared tier.")
        if report.arena.num_pins:
            said.append(f"{report.arena.num_pins} pins ended with it.")
        if removed is not None:
            said.append(f"{removed.num_entries} kept answers went, too.")
        return said

    async def _pin(self, fields: dict[str, str], is_confirmed: bool) -> list[str]:
        ttl_s = _number(fields, "ttl_min") * 60 if "ttl_min" in fields else None
        until = "until it is unpinned" if ttl_s is None else f"for {formats.seconds(ttl_s)}"
        if (request := self._of_recent(fields)) is not None:
            if not is_confirmed:
                return [f"The prompt of {fields['request']} is kept {until}, in whole blocks."]
            pin = await asyncio.to_thread(self._inside.pin, request, float("inf") if ttl_s is None else ttl_s)
        else:
            wanted = validate(PinRequest, _prompt_of(fields) | ({} if ttl_s is None else {"ttl_s": ttl_s}))
            self._admin.pinned(wanted)
            if not is_confirmed:
                return [
                    f"What begins so is kept {until}, in whole blocks. What is not there is computed first."
                ]
            pin = await self._admin.do_pin(wanted)
        return [
            f"{formats.number(pin.num_tokens)} tokens in {pin.num_blocks} blocks are kept {until}.",
            pin.id,
        ]

    async def _unpin(self, fields: dict[str, str], is_confirmed: bool) -> list[str]:
        pin_id = fields.get("id", "")
        if not is_confirmed:
            return [f"{pin_id} may be given up again when room is needed."]
        await self._admin.do_unpin(pin_id)
        return [f"{pin_id} is no longer pinned."]

    async def _warm(self, fields: dict[str, str], is_confirmed: bool) -> list[str]:
        request = self._of_recent(fields)
        if request is None:
            request = self._admin.pinned(validate(PinRequest, _prompt_of(fields)))
        if not is_confirmed:
            return ["The prompt is computed now, so that its beginning is found when it is asked for."]
        usage = await asyncio.to_thread(self._inside.warm, request)
        fresh = usage.prompt_tokens - usage.cached_tokens
        return [
            f"{formats.number(usage.prompt_tokens)} tokens are there: {formats.number(usage.cached_tokens)} "
            f"were, {formats.number(fresh)} were computed in {formats.seconds(usage.total_s)}."
        ]

    def _of_recent(self, fields: dict[str, str]) -> GenerationRequest | None:
        """The request that a form names; ``None`` where it names none."""
        if (name := fields.get("request")) is None:
            return None
        found = self._recent.get(name)
        if found is None or found[1] is None:
            raise ParameterError("What this request asked is not kept (any more).", param="request")
        return replace(found[1].request, session=None, deadline_s=None, retention=None)


def _prompt_of(fields: dict[str, str]) -> dict[str, Any]:
    text = fields.get("system", "")
    if not text:
        raise ParameterError("Give the system text that prompts begin with.", param="system")
    made: dict[str, Any] = {"messages": [{"role": "system", "content": text.replace("\r\n", "\n")}]}
    return made | {name: fields[name] for name in ("tenant", "cache_salt") if name in fields}


def _number(fields: dict[str, str], name: str) -> float:
    try:
        value = float(fields[name])
    except ValueError:
        raise ParameterError("Give a number of minutes.", param=name) from None
    if not 0 < value < 1e9:
        raise ParameterError("Give a number of minutes above 0.", param=name)
    return value


def _meant(given: dict[str, Any]) -> str:
    if given.get("all"):
        return "Everything that is cached here is dropped: of all tenants, in memory and in the shared tier."
    parts = []
    if "tenant" in given:
        parts.append(f"of tenant {given['tenant']}")
    if "cache_salt" in given:
        parts.append("of this salt")
    if "prompt_name" in given:
        parts.append(f"of prompt {given['prompt_name']}")
    if "older_than_s" in given:
        parts.append(f"stored at least {formats.seconds(given['older_than_s'])} ago")
    return f"All that is cached {' and '.join(parts)} is dropped, in memory and in the shared tier."
