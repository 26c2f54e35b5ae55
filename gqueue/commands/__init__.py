"""Every command of the protocol, declared once: its fields, their bounds, the words of a refusal, what it does."""

from gqueue.commands import config, control, core, logs, query, rates, system, workers

__all__ = ["config", "control", "core", "logs", "query", "rates", "system", "workers"]
