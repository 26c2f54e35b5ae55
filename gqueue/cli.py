"""The `gqueue` program: every verb is one command of the protocol, printed for people or as JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import click

from gqueue import __version__
from gqueue.client.client import Client
from gqueue.client.options import wire_options
from gqueue.client.target import Target
from gqueue.client.values import milliseconds, plain, seconds
from gqueue.errors import CommandError, GQueueError, JobFailed, JobTimeout

_BULK = 500  # jobs of one PUSHB


class Refused(click.ClickException):
    """Ends the program with exit code 1 and one line."""


# ---------------------------------------------------------------- connection options and output


@dataclass(slots=True)
class Settings:
    """What the options before and after the verb said; those after it win."""

    url: str | None = None
    host: str | None = None
    port: int | None = None
    token: str | None = None
    token_file: str | None = None
    tls: bool | None = None
    tls_ca: str | None = None
    tls_no_verify: bool | None = None
    timeout: float | None = None
    json: bool | None = None
    output: str | None = None
    quiet: bool | None = None

    @property
    def form(self) -> str:
        """table, json, jsonl or ids."""
        return self.output or ("json" if self.json else "table")

    def target(self) -> Target:
        token = self.token
        if token is None and self.token_file is not None:
            try:
                with open(self.token_file, encoding="utf-8") as file:
                    token = next((line.strip() for line in file if line.strip()), None)
            except OSError as exc:
                raise click.UsageError(f"--token-file {self.token_file}: {exc.strerror}") from None
        tls: Any = True if self.tls else None
        if self.tls_ca is not None or self.tls_no_verify:
            from gqueue.client.tls import trusting

            try:
                tls = trusting(self.tls_ca, verify=not self.tls_no_verify)
            except OSError as exc:
                raise click.UsageError(f"--tls-ca {self.tls_ca}: {exc.strerror or exc}") from None
        try:
            return Target.find(self.url, host=self.host, port=self.port, token=token, tls=tls)
        except ValueError as exc:
            raise click.UsageError(str(exc)) from None

    def client(self) -> Client:
        return Client.at(self.target(), timeout=self.timeout or 30.0)


def _duration(convert: Callable[[Any], float]) -> Callable[[click.Context, click.Parameter, Any], float | None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> float | None:
        try:
            return None if value is None else convert(value)
        except (TypeError, ValueError) as exc:
            raise click.BadParameter(str(exc), ctx, param) from None

    return callback


#: 500ms, 5s, 10m, 2h, 1d; a bare number is in ms, or in seconds.
MS: dict[str, Any] = {"callback": _duration(milliseconds), "metavar": "DURATION"}
SECONDS: dict[str, Any] = {"callback": _duration(seconds), "metavar": "SECONDS"}

_CONNECTION: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "url": (("--url",), {"metavar": "URL", "help": "gqueue://[token@]host[:6789], gqueue+tls://… or unix:///path."}),
    "host": (("-H", "--host"), {"help": "Host of the broker."}),
    "port": (("-p", "--port"), {"type": click.IntRange(1, 65535), "help": "Port of the broker, 6789."}),
    "token": (("-t", "--token"), {"help": "Token of the broker."}),
    "token_file": (("--token-file",), {"metavar": "FILE", "help": "File with the token."}),
    "tls": (("--tls",), {"is_flag": True, "help": "Use TLS."}),
    "tls_ca": (("--tls-ca",), {"metavar": "FILE", "help": "Trust the certificates in FILE."}),
    "tls_no_verify": (("--tls-no-verify",), {"is_flag": True, "help": "Trust any certificate."}),
    "timeout": (("--timeout",), {"metavar": "SECONDS", "help": "Longest wait for an answer, 30."}),
    "json": (("--json",), {"is_flag": True, "help": "Print the answer as JSON."}),
    "output": (
        ("-o", "--output"),
        {"type": click.Choice(["table", "json", "jsonl", "ids"]), "help": "Form of what is printed."},
    ),
    "quiet": (("-q", "--quiet"), {"is_flag": True, "help": "Print nothing but errors."}),
}


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        name = str(param.name).removeprefix("connection_")
        setattr(settings_of(ctx), name, SECONDS["callback"](ctx, param, value) if name == "timeout" else value)


def connection(*without: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The connection options, kept in the root context. `without` names spellings that mean something else here."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name, (spellings, extra) in reversed(_CONNECTION.items()):
            left = [spelling for spelling in spellings if spelling not in without]
            if left:
                fn = click.option(
                    *left, f"connection_{name}", expose_value=False, default=None, callback=_remember, **extra
                )(fn)
        return fn

    return decorate


def settings_of(ctx: click.Context) -> Settings:
    return ctx.find_root().ensure_object(Settings)


class Verb(click.Command):
    """A command whose arguments may be JSON that starts with a minus sign."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" not in args:
            for place, arg in enumerate(args):
                if re.fullmatch(r"-\d[\d.eE+-]*", arg) and not (place and args[place - 1].startswith("-")):
                    args = [*args[:place], *args[place + 1 :], "--", arg]
                    break
        return super().parse_args(ctx, args)


def verb(group: click.Group, name: str, *without: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Register a verb; its function gets the client, the settings, and what the command line says."""

    def decorate(fn: Callable[..., Any]) -> click.Command:
        @functools.wraps(fn)
        @click.pass_context
        def call(ctx: click.Context, /, **values: Any) -> Any:
            settings = settings_of(ctx)
            with settings.client() as client:
                return fn(client, settings, **values)

        return group.command(name, cls=Verb)(connection(*without)(call))

    return decorate


def show(settings: Settings, reply: dict[str, Any], text: str, ids: Iterable[str] = ()) -> None:
    """Print an answer in the form that was asked for."""
    if settings.quiet and settings.form == "table":
        return
    if settings.form == "json":
        click.echo(to_json(reply, indent=2))
    elif settings.form == "jsonl":
        rows = reply.get("jobs") or reply.get("queues") or [reply.get("job") or reply]
        for row in rows:
            click.echo(to_json(row))
    elif settings.form == "ids":
        for id in ids:
            click.echo(id)
    else:
        click.echo(text)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON of what came over the wire: whole floats are the integers they were, bytes are base64."""
    return json.dumps(_whole(value), indent=indent, ensure_ascii=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, dict):
        return {str(key): _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, bytes):
        from base64 import b64encode

        return b64encode(value).decode()
    if value is None or isinstance(value, str | int):
        return value
    return plain(value)


def from_json(text: str, what: str) -> Any:
    """JSON from the command line, from `@file` or, for `-`, from standard input."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        except OSError as exc:
            raise click.UsageError(f"{text[1:]}: {exc.strerror}") from None
    try:
        return json.loads(text)
    except ValueError:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise click.UsageError(f"Invalid JSON for {what}: {shown}") from None


def _list(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    """a,b,c"""
    return None if value is None else [item.strip() for item in value.split(",") if item.strip()]


def _lines(rows: Iterable[tuple[str, Any]]) -> str:
    """name: value, one a line, what is not there left out."""
    return "\n".join(f"{name + ':':<10} {value}" for name, value in rows if value is not None)


# ---------------------------------------------------------------- the program


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="gqueue")
@connection()
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A durable job queue. Without a verb it runs the broker, as `start` does."""
    if ctx.invoked_subcommand is None:
        _exec_server(ctx, [])


@cli.group()
def job() -> None:
    """Look at one job."""


@cli.group()
def queue() -> None:
    """Look at queues, pause and resume them."""


@cli.group()
def worker() -> None:
    """Run jobs."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The program's entry: no traceback for anything a user or a broker can cause.

    Exit codes: 0 ok, 1 refused or unreachable, 2 usage.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        code = cli.main(args=arguments, prog_name="gqueue", standalone_mode=False)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message())
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.ClickException as exc:
        _complain(arguments, _message(exc), exc.exit_code)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except GQueueError as exc:
        _complain(arguments, str(exc), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _message(exc: click.ClickException) -> str:
    if isinstance(exc, click.MissingParameter) and exc.param is not None and exc.param.param_type_name == "argument":
        return f"Missing required argument: {exc.param.name}"
    if isinstance(exc, click.UsageError) and exc.ctx is not None and isinstance(exc.ctx.command, click.Group):
        unknown = re.match(r"No such command '(.*?)'", exc.message)
        if unknown:
            known = ", ".join(exc.ctx.command.list_commands(exc.ctx))
            kind = "command" if exc.ctx.parent is None else f"{exc.ctx.info_name} subcommand"
            return f"Unknown {kind}: {unknown[1]}. Use: {known}"
    return " ".join(exc.format_message().split())


def _complain(arguments: list[str], text: str, code: int) -> NoReturn:
    if "--json" in arguments or re.search(r"(?:^| )(?:-o|--output)[ =]?json(?: |$)", " ".join(arguments)):
        click.echo(json.dumps({"ok": False, "error": text}, indent=2, ensure_ascii=False))
    else:
        click.echo(f"Error: {text}", err=True)
    sys.exit(code)


# ---------------------------------------------------------------- core


@verb(cli, "push", "--timeout")
@click.argument("queue")
@click.argument("data", required=False)
@click.option("--name", default="default", help="Name of the job.")
@click.option("-P", "--priority", type=int, help="Higher first; in a group 0 first.")
@click.option("-d", "--delay", **MS, help="Wait before the first run.")
@click.option("--max-attempts", type=int, help="Runs in all, 3.")
@click.option("--backoff", **MS, help="Base of the retry delay, 1s.")
@click.option("--ttl", **MS, help="Drop it when it has not started by then.")
@click.option("--timeout", **MS, help="Longest run.")
@click.option("-u", "--unique-key", help="One live job for each key.")
@click.option("--job-id", help="An id of its own; a second push with it adds nothing.")
@click.option("--depends-on", callback=_list, metavar="ID,ID", help="Wait for these jobs.")
@click.option("--tags", callback=_list, metavar="A,B")
@click.option("-g", "--group-id", metavar="GROUP")
@click.option("--lifo", is_flag=True, default=None, help="Last in, first out.")
@click.option("--remove-on-complete", is_flag=True, default=None)
@click.option("--remove-on-fail", is_flag=True, default=None)
@click.option("--durable", is_flag=True, default=None, help="Answer after the fsync, whatever the broker's setting.")
@click.option("--repeat-every", **MS, help="Run again and again.")
@click.option("--repeat-cron", metavar="EXPR", help="Run by a cron expression.")
@click.option("--wait", is_flag=False, flag_value="30s", **SECONDS, help="Print the result.")
@click.option("--bulk", type=click.File(encoding="utf-8"), metavar="FILE", help="One job a line, JSON: its data.")
def push(
    client: Client,
    settings: Settings,
    queue: str,
    data: str | None,
    name: str,
    wait: float | None,
    bulk: IO[str] | None,
    repeat_every: int | None,
    repeat_cron: str | None,
    max_attempts: int | None,
    **options: Any,
) -> int:
    """Add a job. DATA is JSON, @FILE, or - for standard input."""
    if repeat_every is not None or repeat_cron is not None:
        options["repeat"] = {"every": repeat_every, "pattern": repeat_cron}
    fields = wire_options({"attempts": max_attempts, **options})
    if bulk is not None:
        return _push_bulk(client, settings, queue, name, bulk, fields)
    if data is None:
        raise click.UsageError("Missing required argument: data")
    reply = client.call("PUSH", queue=queue, name=name, data=from_json(data, "data"), **fields)
    if wait is None:
        show(settings, reply, f"Job created: {reply['id']}", [reply["id"]])
        return 0
    if settings.form == "table" and not settings.quiet:
        click.echo(f"Job created: {reply['id']}")
    return _print_result(client, settings, reply["id"], wait)


def _push_bulk(client: Client, settings: Settings, queue: str, name: str, file: IO[str], fields: dict[str, Any]) -> int:
    """Push the lines of a file, each portion stored at once or not at all."""
    if "jobId" in fields:
        raise click.UsageError("--job-id names one job; it does not go with --bulk")
    members = [
        {"name": name, "data": _line(line, place), **fields} for place, line in enumerate(file, 1) if line.strip()
    ]
    ids: list[str] = []
    visible = settings.form == "table" and not settings.quiet and sys.stderr.isatty()
    with click.progressbar(length=len(members), file=sys.stderr, hidden=not visible) as bar:
        for start in range(0, len(members), _BULK):
            portion = members[start : start + _BULK]
            ids += client.pushb(queue, portion)["ids"]
            bar.update(len(portion))
    show(settings, {"ok": True, "ids": ids}, f"Jobs created: {len(ids)}", ids)
    return 0


def _line(line: str, place: int) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise click.UsageError(f"Invalid JSON in line {place}") from None


def _print_result(client: Client, settings: Settings, id: str, wait: float) -> int:
    """Wait for a job; 0 when it completed."""
    from gqueue.client.job import Job

    try:
        result = Job[Any]({"id": id, "queue": ""}, lambda: client).result(wait)
    except JobTimeout:
        raise Refused("Job not completed within timeout") from None
    except JobFailed as exc:
        raise Refused(str(exc)) from None
    show(settings, {"ok": True, "id": id, "completed": True, "result": result}, f"Result: {to_json(result)}", [id])
    return 0


def _describe(job: dict[str, Any], token: str | None = None) -> str:
    attempts = f"{_whole(job.get('attempts', 0))} of {_whole(job.get('maxAttempts', 0))}"
    stack = job.get("stacktrace")
    return _lines(
        [
            ("ID", job["id"]),
            ("Queue", job["queue"]),
            ("Name", job.get("name")),
            ("State", job.get("state")),
            ("Priority", _whole(job.get("priority"))),
            ("Attempts", attempts),
            ("Data", to_json(job.get("data"))),
            ("Result", None if job.get("returnvalue") is None else to_json(job["returnvalue"])),
            ("Error", job.get("failedReason")),
            ("Stack", "\n           ".join(stack) if stack else None),
            ("Token", token),
        ]
    )


@verb(cli, "pull", "-t", "--timeout")
@click.argument("queue")
@click.option("-t", "--timeout", **MS, default=0, help="Wait so long for a job.")
@click.option("-n", "--count", type=click.IntRange(1, 1000), help="Take up to so many.")
@click.option("--owner", help="Take a lease; prints its token.")
@click.option("--lock-ttl", **MS, help="Length of the lease, 30s.")
@click.option("--fail-empty", is_flag=True, help="Exit with 1 when nothing came.")
def pull(
    client: Client,
    settings: Settings,
    queue: str,
    timeout: int,
    count: int | None,
    owner: str | None,
    lock_ttl: int | None,
    fail_empty: bool,
) -> int:
    """Take a job; it stays active until `ack` or `fail`."""
    if count is None:
        reply = client.pull(queue, timeout, owner, lock_ttl, True)
        jobs = [reply["job"]] if reply.get("job") else []
        tokens = [reply.get("token")]
    else:
        reply = client.pullb(queue, count, timeout, owner, lock_ttl, detach=True)
        jobs = reply["jobs"]
        tokens = reply.get("tokens") or [None] * len(jobs)
    text = "\n\n".join(_describe({"state": "active", **job}, token) for job, token in zip(jobs, tokens, strict=False))
    show(settings, reply, text or "No job available", [job["id"] for job in jobs])
    return 1 if fail_empty and not jobs else 0


@verb(cli, "ack")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("-r", "--result", help="JSON, @FILE or -.")
@click.option("--lock", metavar="TOKEN", help="Token of the lease.")
def ack(client: Client, settings: Settings, ids: tuple[str, ...], result: str | None, lock: str | None) -> None:
    """Complete jobs."""
    value = {} if result is None else {"result": from_json(result, "result")}
    if len(ids) == 1:
        reply = client.call("ACK", id=ids[0], token=lock, **value)
    else:
        many = {"results": [value["result"]] * len(ids)} if value else {}
        reply = client.call("ACKB", ids=ids, tokens=None if lock is None else [lock] * len(ids), **many)
    show(settings, reply, "OK", ids)


@verb(cli, "fail")
@click.argument("id")
@click.option("-e", "--error", help="What went wrong.")
@click.option("--lock", metavar="TOKEN", help="Token of the lease.")
@click.option("--unrecoverable", is_flag=True, default=None, help="No further attempt.")
def fail(
    client: Client, settings: Settings, id: str, error: str | None, lock: str | None, unrecoverable: bool | None
) -> None:
    """Fail a job; it is retried while it has attempts left."""
    show(settings, client.fail(id, error, None, unrecoverable, lock), "OK", [id])


# ---------------------------------------------------------------- job


@verb(job, "get")
@click.argument("id")
@click.option("--custom", is_flag=True, help="ID is the custom id.")
def job_get(client: Client, settings: Settings, id: str, custom: bool) -> None:
    """Show a job."""
    reply = client.get_job_by_custom_id(id) if custom else client.get_job(id)
    show(settings, reply, _describe(reply["job"]), [reply["job"]["id"]])


@verb(job, "state")
@click.argument("id")
def job_state(client: Client, settings: Settings, id: str) -> int:
    """Show where a job stands; exit 1 when there is none."""
    reply = client.get_state(id)
    show(settings, reply, f"State: {reply['state']}", [id])
    return 1 if reply["state"] == "unknown" else 0


@verb(job, "result")
@click.argument("id")
def job_result(client: Client, settings: Settings, id: str) -> None:
    """Show what a job returned."""
    reply = client.get_result(id)
    show(settings, reply, f"Result: {to_json(reply.get('result'))}", [id])


@verb(job, "wait", "-t", "--timeout")
@click.argument("id")
@click.option("-t", "--timeout", **MS, default=30_000, help="Wait so long, 30s.")
def job_wait(client: Client, settings: Settings, id: str, timeout: int) -> int:
    """Wait for a job and show what it returned; exit 1 when it fails or takes longer."""
    return _print_result(client, settings, id, timeout / 1000)


# ---------------------------------------------------------------- queue


@verb(queue, "list")
def queue_list(client: Client, settings: Settings) -> None:
    """Show the names of all queues."""
    reply = client.list_queues()
    names = reply["queues"]
    show(settings, reply, "\n".join(f"  - {name}" for name in names) or "No queues found", names)


@verb(queue, "counts")
@click.argument("queue")
def queue_counts(client: Client, settings: Settings, queue: str) -> None:
    """Show how many jobs are in each state."""
    reply = client.get_job_counts(queue)
    text = ""
    if settings.form == "table":
        from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

        text = tabulate([(state, int(count)) for state, count in reply["counts"].items()], headers=("State", "Jobs"))
    show(settings, reply, text)


@verb(queue, "pause")
@click.argument("queue")
def queue_pause(client: Client, settings: Settings, queue: str) -> None:
    """Deliver nothing from a queue."""
    show(settings, client.pause(queue), "OK")


@verb(queue, "resume")
@click.argument("queue")
def queue_resume(client: Client, settings: Settings, queue: str) -> None:
    """Deliver again."""
    show(settings, client.resume(queue), "OK")


# ---------------------------------------------------------------- broker


@verb(cli, "ping")
def ping(client: Client, settings: Settings) -> None:
    """Ask whether the broker answers."""
    show(settings, client.ping(), "PONG")


@cli.command("version")
@connection()
@click.pass_context
def version(ctx: click.Context) -> None:
    """Show the version of this program."""
    show(settings_of(ctx), {"version": __version__}, f"gqueue {__version__}")


@cli.command(
    "start", context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
)
@click.pass_context
def start(ctx: click.Context) -> None:
    """Run the broker; its options are those of gqueue-server."""
    _exec_server(ctx, ctx.args)


def _exec_server(ctx: click.Context, arguments: list[str]) -> NoReturn:
    """Become gqueue-server: it must patch before anything else is loaded, so it needs a fresh interpreter."""
    settings = settings_of(ctx)
    given = [
        *(["--host", settings.host] if settings.host else []),
        *(["--port", str(settings.port)] if settings.port else []),
    ]
    short = {"-H": "--host", "-p": "--port"}
    sys.stdout.flush()
    command = [sys.executable, "-m", "gqueue.server", *given, *[short.get(arg, arg) for arg in arguments]]
    os.execv(sys.executable, command)


@cli.command("demo")
@click.option("--jobs", type=click.IntRange(min=2), default=1000, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--storage", metavar="URL", help="Store of the broker; a SQLite file in a fresh folder.")
@click.option("--keep", is_flag=True, help="Keep the folder and say where it is.")
def demo(jobs: int, workers: int, storage: str | None, keep: bool) -> None:
    """Run jobs through a broker, restart it half-way, and check that each was done exactly once."""
    if storage is not None and storage.startswith("memory:"):
        raise click.UsageError("memory:// survives no restart; the demo needs a durable store")
    from gqueue import demo as program

    program.run(jobs=jobs, workers=workers, storage=storage, keep=keep)


# ---------------------------------------------------------------- worker


@worker.command("run")
@connection()
@click.argument("targets", nargs=-1, required=True, metavar="MODULE:QUEUE...")
@click.option("-c", "--concurrency", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--pool", type=click.Choice(["thread", "gevent", "solo"]), default="thread", show_default=True)
@click.option("--burst", is_flag=True, help="End when the queues are empty.")
@click.option("--max-jobs", type=click.IntRange(min=1), metavar="N", help="End after N jobs.")
@click.option("--imports", multiple=True, metavar="PATTERN", help="Modules whose functions `enqueue` may name.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def worker_run(
    ctx: click.Context,
    targets: tuple[str, ...],
    concurrency: int,
    pool: Any,
    burst: bool,
    max_jobs: int | None,
    imports: tuple[str, ...],
    log_level: str,
    log_format: str,
) -> None:
    """Run the tasks of queues: MODULE:QUEUE names a Queue object, MODULE all that it has.

    SIGTERM and ^C finish the running jobs, a second one does not.
    """
    if pool == "gevent":  # before the user's modules are imported
        from gevent import monkey  # type: ignore[import-untyped, unused-ignore]

        monkey.patch_all()
    from gqueue.client.queue import Queue
    from gqueue.client.worker import Worker
    from gqueue.log import log_to_stderr

    log_to_stderr(log_level, log_format)
    settings = settings_of(ctx)
    sys.path.insert(0, "")
    queues: list[Queue] = [found for target in targets for found in _queues(target, Queue)]
    chosen = any(
        value is not None for value in (settings.url, settings.host, settings.port, settings.token, settings.tls)
    )
    client = settings.client() if chosen or settings.token_file or settings.tls_ca else queues[0].client
    for queue in queues:
        if not settings.quiet:
            click.echo(f"{queue.name}: {', '.join(sorted(queue.tasks)) or 'no tasks'}", err=True)
    try:
        client.ping()
    except CommandError:
        raise
    except GQueueError:
        if burst:
            raise  # otherwise the worker goes on trying, and says so
    try:
        running = Worker(queues, client=client, concurrency=concurrency, pool=pool, imports=imports, autorun=False)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from None
    running.run(burst=burst, max_jobs=max_jobs)


def _queues(target: str, kind: type[Any]) -> list[Any]:
    """The Queue objects that `module:name` or `module` stands for."""
    from importlib import import_module

    module_name, _, attribute = target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as exc:
        raise click.UsageError(f"cannot import {module_name}: {exc}") from None
    if attribute:
        found = getattr(module, attribute, None)
        if not isinstance(found, kind):
            raise click.UsageError(
                f"{target} is no Queue" if found is not None else f"{module_name} has no {attribute!r}"
            )
        return [found]
    queues = [value for value in vars(module).values() if isinstance(value, kind)]
    if not queues:
        raise click.UsageError(f"{module_name} has no Queue")
    return queues


if __name__ == "__main__":
    main()
