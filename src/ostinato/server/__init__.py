"""The HTTP server: OpenAI's wire formats in front of a runtime."""

from .app import create_app
from .run import Server, serve
from .settings import ApiKey, ServerSettings, server_settings

__all__ = ["ApiKey", "Server", "ServerSettings", "create_app", "serve", "server_settings"]
