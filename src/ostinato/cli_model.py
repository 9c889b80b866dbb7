"""What commands share that need a model's tokenizer and not the model."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .config import Settings
from .errors import ParameterError

if TYPE_CHECKING:
    from .prompt.template import Template
    from .prompt.tokens import HFTokenizer

model_option = click.option("--model", help="Whose tokenizer (and template) to take.")
store_option = click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store.")
offline_option = click.option(
    "--offline", is_flag=True, default=None, help="Never ask the network for a model."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def tokenizer_of(model: str | None, store: Path | None, offline: bool | None) -> tuple[HFTokenizer, str]:
    """The tokenizer of a model that is here or is fetched, and the nonce it was made with."""
    from .models.fetch import fetch
    from .models.store import ModelStore
    from .prompt.tokens import HFTokenizer

    settings = Settings.from_environment(os.environ, model=model, store=store, offline=offline)
    assert settings.store is not None
    local = fetch(
        settings.model,
        ModelStore(settings.store),
        progress=None,
        offline=settings.offline,
        token=settings.hf_token,
    )
    nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
    return HFTokenizer.from_folder(local.path, nonce=nonce), nonce


def template_of(tokenizer: HFTokenizer, nonce: str, choice: str) -> Template:
    from .ports import SystemClock
    from .prompt.template import template_for

    template = template_for(tokenizer, choice, clock=SystemClock(), nonce=nonce)
    if template is None:
        raise ParameterError("this model has no chat template of its own: name one", param="template")
    return template
