"""Each setting once: its name, flags, environment, key of the settings file, default and unit. The program's help and docs follow."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gqueue.errors import BadSetting

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def _duration(name: str, text: str) -> int:
    """ms: a bare number, or 500ms, 5s, 10m, 2h, 1d."""
    for unit in ("ms", "s", "m", "h", "d"):
        number = text.removesuffix(unit)
        if number != text and number.isdigit():
            return int(number) * _UNITS[unit]
    if not text.isdigit():
        raise BadSetting(f'Invalid {name}: "{text}" (expected a whole number of milliseconds >= 0)')
    return int(text)


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise BadSetting(f'Invalid {name}: "{text}" (expected a whole number >= 0)')
    return int(text)


def _bytes(name: str, text: str) -> int:
    if not text.isdigit():
        raise BadSetting(f'Invalid {name}: "{text}" (expected a whole number of bytes >= 0)')
    return int(text)


def _port(name: str, text: str) -> int:
    if not text.lstrip("-").isdigit() or not -1 <= int(text) <= 65_535:
        raise BadSetting(f'Invalid {name}: "{text}" (expected a port, 0 to 65535)')
    return int(text)


def _text(_name: str, text: str) -> str:
    return text


def _words(_name: str, text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _switch(name: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on", ""):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise BadSetting(f'Invalid {name}: "{text}" (expected true or false)')


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise BadSetting(f'Invalid {name}: "{text}" (expected {" or ".join(choices)})')
        return text

    return read


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `env` names are looked at in order; `read` turns text into the value or raises BadSetting."""

    name: str
    flags: tuple[str, ...]
    env: tuple[str, ...]
    key: str
    read: Callable[[str, str], Any]
    default: Any
    unit: str
    says: str


def _setting(
    name: str, flags: str, env: str, key: str, read: Callable[[str, str], Any], default: Any, says: str, unit: str = ""
) -> Setting:
    ours, *theirs = env.split()
    names = (f"GQUEUE_{ours}", *theirs)
    return Setting(name, tuple(flags.split()), names, key, read, default, unit, says)


SETTINGS: tuple[Setting, ...] = (
    _setting("host", "--host", "HOST HOST", "server.host", _text, "127.0.0.1", "Address to listen on."),
    _setting("port", "--port --tcp-port", "TCP_PORT GQUEUE_PORT TCP_PORT", "server.port", _port, 6789, "TCP port; 0 takes a free one."),
    _setting("socket", "--socket", "TCP_SOCKET_PATH TCP_SOCKET_PATH", "server.socket", _text, None, "Unix socket to listen on, too."),
    _setting("http_port", "--http-port", "HTTP_PORT HTTP_PORT", "server.http_port", _port, -1, "HTTP port; not served yet."),
    _setting("storage", "--storage", "STORAGE", "storage.url", _text, "sqlite:///gqueue.db", "Where jobs are kept: memory:// or sqlite:///FILE."),
    _setting(
        "data_path",
        "--data-path",
        "DATA_PATH BUNQUEUE_DATA_PATH BQ_DATA_PATH DATA_PATH SQLITE_PATH",
        "storage.data_path",
        _text,
        None,
        "Short for --storage sqlite:///FILE.",
    ),
    _setting("durability", "--durability", "DURABILITY", "storage.durability", _one_of("fsync", "commit"), "fsync", "What an ok survives: fsync a power cut, commit a crash of the broker."),
    _setting("writer", "--writer", "WRITER", "storage.writer", _one_of("thread", "process"), "thread", "What commits to a SQLite file: a thread of the broker or a process beside it."),
    _setting("wait_for_lock", "--wait-for-lock", "WAIT_FOR_LOCK", "storage.wait_for_lock", _whole, 0, "Wait for another broker to give the store up.", "s"),
    _setting("allow_network_fs", "--allow-network-fs", "ALLOW_NETWORK_FS", "storage.allow_network_fs", _switch, False, "Accept a database on a network file system."),
    _setting("max_completed_jobs", "--max-completed-jobs", "MAX_COMPLETED_JOBS BUNQUEUE_MAX_COMPLETED_JOBS MAX_COMPLETED_JOBS", "storage.max_completed_jobs", _whole, 50_000, "Completed jobs kept in memory."),
    _setting("completed_retention", "--completed-retention-ms", "COMPLETED_RETENTION_MS BUNQUEUE_COMPLETED_RETENTION_MS COMPLETED_RETENTION_MS", "storage.completed_retention", _duration, None, "Delete completed jobs of this age.", "ms"),
    _setting("auth_tokens", "--auth-tokens", "AUTH_TOKENS AUTH_TOKENS", "auth.tokens", _words, (), "Tokens of which a client must send one, by commas."),
    _setting("auth_token_file", "--auth-token-file", "AUTH_TOKEN_FILE", "auth.token_file", _text, None, "File with more tokens, one a line."),
    _setting("tls_cert", "--tls-cert", "TLS_CERT_FILE TLS_CERT_FILE", "server.tls_cert", _text, None, "Certificate (PEM)."),
    _setting("tls_key", "--tls-key", "TLS_KEY_FILE TLS_KEY_FILE", "server.tls_key", _text, None, "Key of the certificate (PEM)."),
    _setting("log_level", "--log-level", "LOG_LEVEL LOG_LEVEL", "logging.level", _one_of("debug", "info", "warning", "error"), "info", "Least important line to log."),
    _setting("log_format", "--log-format", "LOG_FORMAT LOG_FORMAT", "logging.format", _one_of("text", "json"), "text", "Form of the log on stderr."),
    _setting("pid_file", "--pid-file", "PID_FILE", "server.pid_file", _text, None, "File that holds the process number while the broker serves."),
    _setting("check", "--check", "CHECK", "server.check", _switch, False, "Open and verify the store, print the settings without secrets, and exit."),
    _setting("shutdown_timeout", "--shutdown-timeout", "SHUTDOWN_TIMEOUT_MS SHUTDOWN_TIMEOUT_MS", "timeouts.shutdown", _duration, 30_000, "How long a stop waits for active jobs.", "ms"),
    _setting("rate_limit", "--rate-limit", "RATE_LIMIT_MAX_REQUESTS RATE_LIMIT_MAX_REQUESTS", "limits.requests", _whole, 100_000, "Requests of one connection in a window; 0 = no limit."),
    _setting("rate_window", "--rate-window", "RATE_LIMIT_WINDOW_MS RATE_LIMIT_WINDOW_MS", "limits.window", _duration, 1000, "The window of --rate-limit.", "ms"),
    _setting("idle_timeout", "--tcp-idle-timeout", "TCP_IDLE_TIMEOUT_MS TCP_IDLE_TIMEOUT_MS", "timeouts.idle", _duration, 60_000, "Reset a connection that leaves a frame unfinished for so long; 0 = never.", "ms"),
    _setting("max_write_queue", "--max-write-queue", "TCP_MAX_WRITE_QUEUE_BYTES TCP_MAX_WRITE_QUEUE_BYTES", "limits.write_queue", _bytes, 67_108_864, "Close a connection with more unsent bytes; 0 = never.", "bytes"),
    _setting("stall_check", "--stall-check", "STALL_CHECK_MS STALL_CHECK_MS", "timeouts.stall_check", _duration, 5000, "How often silent jobs are looked for.", "ms"),
    _setting("cleanup_interval", "--cleanup-interval", "CLEANUP_INTERVAL_MS CLEANUP_INTERVAL_MS", "timeouts.cleanup", _duration, 10_000, "How often old jobs and empty queues are removed.", "ms"),
    _setting("max_job_releases", "--max-job-releases", "MAX_JOB_RELEASES MAX_JOB_RELEASES", "limits.job_releases", _whole, 10, "Closed connections in a row that a job survives; 0 = any number."),
    _setting("max_lost", "--max-lost", "MAX_LOST", "limits.lost", _whole, 10, "Losses in a row that a job survives; 0 = any number."),
    _setting("worker_timeout", "--worker-timeout", "WORKER_TIMEOUT_MS WORKER_TIMEOUT_MS", "timeouts.worker", _duration, 30_000, "A worker unseen for so long is stale.", "ms"),
)  # fmt: skip

_SWITCHES = {flag for setting in SETTINGS if setting.read is _switch for flag in setting.flags}


class Settings:
    """All settings, by attribute. Flag before environment before file before default."""

    def __init__(self, **values: Any) -> None:
        for setting in SETTINGS:
            setattr(self, setting.name, values.get(setting.name, setting.default))
        if self.data_path is not None:
            self.storage = f"sqlite:///{self.data_path}"

    def shown(self) -> str:
        """All of them, a line each, without secrets."""
        lines = []
        for setting in SETTINGS:
            value = getattr(self, setting.name)
            if setting.name == "auth_tokens":
                value = f"({len(value)})"
            elif setting.name == "storage":
                value = re.sub(r"(://[^/@]*:)[^/@]*@", r"\1***@", value)
            lines.append(f"{setting.key} = {'' if value is None else value}")
        return "\n".join(lines)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """Raises BadSetting, in one line, for whatever does not exist or does not fit."""
        flags = _read_flags(argv)
        config = flags.pop("config", None) or environ.get("GQUEUE_CONFIG")
        file = _read_file(config) if config else {}
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            source = next(((name, environ[name]) for name in setting.env if environ.get(name)), None)
            if setting.name in flags:
                values[setting.name] = setting.read(setting.flags[0], flags[setting.name])
            elif source is not None:
                values[setting.name] = setting.read(source[0].removeprefix("GQUEUE_"), source[1])
            elif setting.key in file:
                values[setting.name] = setting.read(setting.key, file[setting.key])
        return cls(**values)


def _read_flags(argv: Sequence[str]) -> dict[str, str]:
    known = {flag: setting.name for setting in SETTINGS for flag in setting.flags} | {
        "--config": "config",
        "-c": "config",
    }
    found: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, joined, value = word.partition("=")
        if flag not in known:
            near = difflib.get_close_matches(flag, known, 1)
            hint = f"; did you mean {near[0]}?" if near else " (--help lists them)"
            raise BadSetting(f"No such option: {flag}{hint}")
        if not joined:
            if flag in _SWITCHES:
                value = "true"
            elif words:
                value = words.pop(0)
            else:
                raise BadSetting(f"Option {flag} needs a value")
        found[known[flag]] = value
    return found


def _read_file(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise BadSetting(f"Cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadSetting(f"{path}: {error}") from None
    known = {setting.key for setting in SETTINGS}
    values: dict[str, str] = {}
    for table, entries in tables.items():
        for name, value in entries.items() if isinstance(entries, dict) else ():
            key = f"{table}.{name}"
            if key not in known:
                raise BadSetting(f"{path}: unknown key {key}")
            values[key] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if not isinstance(entries, dict):
            raise BadSetting(f"{path}: unknown key {table}")
    return values


def usage() -> str:
    """The help of gqueue-server."""
    lines = ["usage: gqueue-server [options]", ""]
    for setting in SETTINGS:
        value = "" if setting.read is _switch else f" {setting.unit.upper() or 'VALUE'}"
        default = "" if setting.default in (None, (), False) else f" [{setting.default}]"
        lines.append(f"  {', '.join(setting.flags)}{value}\n        {setting.says}{default}")
    lines.append("  -c, --config FILE\n        Settings file (TOML).")
    lines.append("  --version, --help")
    return "\n".join(lines)
