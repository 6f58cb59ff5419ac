"""What an agent is put into: tasks, tools, scaffolds and their registry. `@env` is where an author begins."""

from envs.base import Environment, Episode, Scaffold, ToolError
from envs.registry import env, list_environments, load
from envs.types import Message, Missing, Score, Task, ToolCall, Trajectory

__all__ = [
    "Environment",
    "Episode",
    "Message",
    "Missing",
    "Scaffold",
    "Score",
    "Task",
    "ToolCall",
    "ToolError",
    "Trajectory",
    "env",
    "list_environments",
    "load",
]
