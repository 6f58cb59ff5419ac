"""The records of a rollout as JSON and back, exactly: for the token log, checkpoints and rollout files.

Lists and mappings of an environment's own (`Task.private`, `Score.parts`, tool arguments) keep their types:
tuples, bytes, sets and mappings with other keys than text are tagged. What JSON cannot hold is refused.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Container, Mapping, Sequence
from itertools import count
from typing import Any

from envs.types import (
    Boundary,
    ErrorInfo,
    FinishReason,
    Group,
    Images,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.engine.sampler import SamplingParams
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.blob import (
    Blob,
    column_from_json,
    column_to_json,
    images_from_json,
    images_to_json,
    replay_from_json,
    replay_to_json,
)

Json = Any
_ROLES = {str(role): role for role in Role}


class CodecError(TypeError):
    """A value that has no exact JSON form: which, and what to use instead."""


def encode_value(value: Any) -> Json:
    """Returns the tagged JSON form of a plain Python value.

    Raises:
        CodecError: A value of another type than None, bool, int, float, str, bytes, list, tuple, set or
        mapping.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode_value(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {f"${type(value).__name__}": [encode_value(item) for item in sorted(value)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode_value(item) for key, item in value.items()}
        return {"$map": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    raise CodecError(
        f"a value of type {type(value).__name__} cannot be written to the token log or a checkpoint; "
        "use numbers, text, bytes, lists, tuples, sets and mappings in tasks, arguments and scores"
    )


def decode_value(value: Json) -> Any:
    """Returns what `encode_value` was given."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))).startswith("$"):
        return _UNTAG[tag](value[tag])
    return {key: decode_value(item) for key, item in value.items()}


_UNTAG = {
    "$tuple": lambda items: tuple(decode_value(item) for item in items),
    "$set": lambda items: {decode_value(item) for item in items},
    "$frozenset": lambda items: frozenset(decode_value(item) for item in items),
    "$bytes": base64.b64decode,
    "$map": lambda items: {decode_value(key): decode_value(item) for key, item in items},
}


def message_to_json(message: Message) -> Json:
    """One message as JSON."""
    calls = [[call.name, encode_value(call.arguments), call.id, call.number] for call in message.tool_calls]
    return [str(message.role), message.content, calls, message.tool_call_id, message.reasoning]


def message_from_json(data: Json) -> Message:
    """The message of `message_to_json`."""
    role, content, calls, call_id, reasoning = data
    tool_calls = tuple(ToolCall(name, decode_value(args), id_, number) for name, args, id_, number in calls)
    known: Role | str = _ROLES.get(role) or role
    return Message(known, content, tool_calls, call_id, reasoning)


def task_to_json(task: Task) -> Json:
    """One task, its private part included, as JSON."""
    return {
        "id": task.id,
        "prompt": [message_to_json(message) for message in task.prompt],
        "private": encode_value(task.private),
        "gold": task.gold,
        "metadata": encode_value(task.metadata),
    }


def task_from_json(data: Json) -> Task:
    """The task of `task_to_json`."""
    prompt = tuple(message_from_json(message) for message in data["prompt"])
    return Task(
        data["id"], prompt, decode_value(data["private"]), data["gold"], decode_value(data["metadata"])
    )


def turn_to_json(turn: Turn, blob: Blob | None = None, *, sampled: bool = True) -> Json:
    """One turn as JSON; floats keep every bit. With `blob` the columns of tokens are bytes in that.

    Without `sampled` what was sampled is left out: tokens, and the engine's choices for as many inputs.
    """
    ids, logprobs, versions, left_out = turn.completion_ids, turn.logprobs, turn.policy_versions, 0
    if not sampled:
        ids, logprobs, versions, left_out = (), (), (), len(ids)
    images = {} if turn.images is None else {"images": images_to_json(turn.images, blob)}
    return images | {
        "prompt_ids": column_to_json("i", turn.prompt_ids, blob),
        "completion_ids": column_to_json("i", ids, blob),
        "logprobs": column_to_json("d", logprobs, blob),
        "policy_versions": column_to_json("i", versions, blob),
        "finish": str(turn.finish),
        "message": message_to_json(turn.message),
        "observations": [message_to_json(message) for message in turn.observations],
        "parse_error": turn.parse_error,
        "replay_starts": [list(start) for start in turn.replay_starts],
        "replay": replay_to_json(turn.replay, blob, left_out),
    }


def turn_from_json(data: Json, blob: memoryview | None = None) -> Turn:
    """The turn of `turn_to_json`."""
    prompt_ids, ids, logprobs, versions = (
        column_from_json(data[name], blob)
        for name in ("prompt_ids", "completion_ids", "logprobs", "policy_versions")
    )
    return Turn(
        prompt_ids,
        ids,
        logprobs,
        versions,
        FinishReason(data["finish"]),
        message_from_json(data["message"]),
        tuple(message_from_json(message) for message in data["observations"]),
        data["parse_error"],
        tuple((encoder, decoder) for encoder, decoder in data.get("replay_starts", ())),
        replay_from_json(data.get("replay"), blob),
        images_from_json(data.get("images"), blob),
    )


def key_to_json(key: TrajectoryKey) -> Json:
    """A trajectory's key as JSON."""
    return [key.task, key.effort, key.scaffold, key.group, key.index, key.attempt]


def key_from_json(data: Json) -> TrajectoryKey:
    """The key of `key_to_json`."""
    return TrajectoryKey(*data)


def score_to_json(score: Score | Missing) -> Json:
    """A verdict, or why there is none, as JSON."""
    if isinstance(score, Missing):
        return {"missing": score.reason, "boundary": str(score.boundary)}
    return {"value": score.value, "parts": encode_value(score.parts)}


def score_from_json(data: Json) -> Score | Missing:
    """The verdict of `score_to_json`."""
    if "missing" in data:
        return Missing(data["missing"], Boundary(data["boundary"]))
    return Score(data["value"], decode_value(data["parts"]))


def trajectory_to_json(trajectory: Trajectory, blob: Blob | None = None, in_log: Container[int] = ()) -> Json:
    """One trajectory as JSON; with `blob` the columns of tokens are bytes in that.

    Of turns `in_log`, numbered over all branches, what was sampled is left out.
    """
    error, numbers = trajectory.error, count()
    return {
        "key": key_to_json(trajectory.key),
        "branches": [
            [turn_to_json(turn, blob, sampled=next(numbers) not in in_log) for turn in branch]
            for branch in trajectory.branches
        ],
        "status": str(trajectory.status),
        "stop": str(trajectory.stop),
        "score": score_to_json(trajectory.score),
        "error": [str(error.boundary), error.type, error.message] if error else None,
        "timings": encode_value(trajectory.timings),
    }


def trajectory_from_json(data: Json, blob: memoryview | None = None) -> Trajectory:
    """The trajectory of `trajectory_to_json`."""
    error = data["error"]
    return Trajectory(
        key_from_json(data["key"]),
        tuple(tuple(turn_from_json(turn, blob) for turn in branch) for branch in data["branches"]),
        Status(data["status"]),
        StopReason(data["stop"]),
        score_from_json(data["score"]),
        ErrorInfo(Boundary(error[0]), error[1], error[2]) if error else None,
        decode_value(data["timings"]),
    )


def trajectory_to_parts(trajectory: Trajectory, in_log: Sequence[Sequence[int]] = ()) -> list[bytes]:
    """One trajectory as the payload of a log's record: the JSON's length, the JSON, and columns as bytes.

    `in_log` are turns whose tokens stay in the log's steps, as `rl.rollout.ends` found.
    """
    blob = Blob()
    data = trajectory_to_json(trajectory, blob, {number for number, _, _ in in_log})
    data["in_log"] = in_log
    text = json.dumps(data).encode()
    return [struct.pack("<I", len(text)), text, *blob.parts]


def text_to_parts(text: bytes) -> list[bytes]:
    """The payload of a record of a JSON text that has all its columns."""
    return [struct.pack("<I", len(text)), text]


def trajectory_from_bytes(payload: bytes) -> tuple[Trajectory, list[int], list[list[int]]]:
    """What `trajectory_to_parts` was given, from its parts joined.

    Between both the turns of which a record of format 2 left only the choices in the steps.
    """
    (length,) = struct.unpack_from("<I", payload)
    data = json.loads(payload[4 : 4 + length])
    trajectory = trajectory_from_json(data, memoryview(payload)[4 + length :])
    return trajectory, data.get("in_steps", []), data.get("in_log", [])


def images_to_bytes(images: Images) -> bytes:
    """The images of a prompt as the payload of a log's record."""
    blob = Blob()
    text = json.dumps(images_to_json(images, blob)).encode()
    return b"".join([struct.pack("<I", len(text)), text, *blob.parts])


def images_from_bytes(payload: bytes) -> Images | None:
    """What `images_to_bytes` was given."""
    (length,) = struct.unpack_from("<I", payload)
    return images_from_json(json.loads(payload[4 : 4 + length]), memoryview(payload)[4 + length :])


def group_to_json(group: Group) -> Json:
    """One group as JSON."""
    return {
        "id": group.id,
        "task": task_to_json(group.task),
        "effort": group.effort,
        "scaffold": group.scaffold,
        "trajectories": [trajectory_to_json(trajectory) for trajectory in group.trajectories],
    }


def group_from_json(data: Json) -> Group:
    """The group of `group_to_json`."""
    trajectories: Sequence[Trajectory] = [trajectory_from_json(item) for item in data["trajectories"]]
    return Group(
        data["id"], task_from_json(data["task"]), data["effort"], data["scaffold"], tuple(trajectories)
    )


def assignment_to_json(assignment: Assignment) -> Json:
    """One assignment as JSON."""
    s = assignment.sampling
    return {
        "key": key_to_json(assignment.key),
        "task": task_to_json(assignment.task),
        "environment": assignment.environment,
        "sampling": [s.temperature, s.top_p, s.top_k, s.max_tokens, sorted(s.stop_ids), s.seed],
        "seed": assignment.seed,
        "purpose": str(assignment.purpose),
    }


def assignment_from_json(data: Json) -> Assignment:
    """The assignment of `assignment_to_json`."""
    temperature, top_p, top_k, max_tokens, stop_ids, seed = data["sampling"]
    return Assignment(
        key=key_from_json(data["key"]),
        task=task_from_json(data["task"]),
        environment=data["environment"],
        sampling=SamplingParams(temperature, top_p, top_k, max_tokens, frozenset(stop_ids), seed),
        seed=data["seed"],
        purpose=Purpose(data["purpose"]),
    )
