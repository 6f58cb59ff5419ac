"""Images in turns: kept in the log and in records, shown to the engine and to the trainer where they were."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.types import (
    FinishReason,
    Message,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.engine.sampler import SamplingParams
from model.images import PreparedImage
from model.vision import TokenType, span_types
from rl.rollout import codec
from rl.rollout.assignment import Assignment
from rl.rollout.pictures import history_images, images_of, last_images
from rl.rollout.wal import TokenLog
from rl.trainers.data import trajectory_samples
from rl.trainers.packing import micro_batches

TEXT = int(TokenType.TEXT)
SPAN = [int(kind) for kind in span_types((2, 3), 1)]
KEY = TrajectoryKey("t", 50, "external", 0, 0)


def picture(seed: int) -> PreparedImage:
    return PreparedImage(torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(seed)), (2, 3))


TYPES = [TEXT, *SPAN, TEXT]
IMAGES = images_of(TYPES, [picture(0)])


def seen() -> Trajectory:
    """A prompt with an image, a turn, an answer without one, a turn, and an answer with another image."""

    def turn(prompt: int, number: int, images) -> Turn:
        said = Message(Role.ASSISTANT, "x")
        return Turn((1,) * prompt, (2, 3), (-1.0,) * 2, (0, 0), FinishReason.STOP, said, images=images)

    first, second = turn(len(TYPES), 0, IMAGES), turn(3, 1, None)
    third = turn(len(SPAN), 2, images_of(SPAN, [picture(1)]))
    return Trajectory(KEY, ((first, second, third),), Status.FINISHED, StopReason.ANSWER, Score(1.0))


def test_records_come_back_from_json_and_from_the_log_s_bytes() -> None:
    whole = seen()
    assert codec.trajectory_from_json(json.loads(json.dumps(codec.trajectory_to_json(whole)))) == whole
    found, *_ = codec.trajectory_from_bytes(b"".join(codec.trajectory_to_parts(whole)))
    assert found == whole


def test_a_sample_shows_the_trainer_every_image_where_the_sampler_saw_it() -> None:
    (sample,) = trajectory_samples(seen(), 1.0)
    assert sample.images is not None
    types = [*TYPES, TEXT, TEXT, *[TEXT] * 5, *SPAN, TEXT, TEXT]
    assert sample.images.types.tolist() == types and len(sample) == len(types)
    assert [torch.equal(i.patches, picture(n).patches) for n, i in enumerate(sample.images.images)] == [
        True
    ] * 2
    (batch,) = micro_batches([sample], 512, torch.device("cpu"))
    assert batch.image_types is not None and batch.image_types.tolist()[: len(types)] == types
    assert len(batch.images) == 2
    (text_only,) = trajectory_samples(seen(), 1.0, max_tokens=len(TYPES) + 4)
    assert text_only.images is not None and len(text_only.images.images) == 1
    with pytest.raises(ValueError, match="inside an image"):
        trajectory_samples(seen(), 1.0, max_tokens=len(types) - 4)


def test_a_history_without_images_has_none_and_a_part_of_one_has_its_own() -> None:
    assert history_images([(3, None, 2), (1, None, 0)]) is None
    pictures = [picture(0), picture(1)]
    found = last_images([*TYPES, TEXT, *SPAN], pictures, len(SPAN) + 1)
    assert found is not None and len(found.patches) == 1
    assert np.frombuffer(found.types.data, np.int8).tolist() == [TEXT, *SPAN]
    assert found == images_of([TEXT, *SPAN], [picture(1)])


def test_a_turn_that_was_cut_off_still_has_its_images(tmp_path: Path) -> None:
    task = Task("t", (Message(Role.USER, "?"),))
    sample = Assignment(key=KEY, task=task, environment="e", sampling=SamplingParams(), seed=0)
    log = TokenLog(tmp_path)
    log.start(sample)
    log.begin(sample.session, 0, [1] * len(TYPES), new_branch=True, images=IMAGES)
    log.close()
    for _ in range(2):
        log = TokenLog(tmp_path)
        log.compact()
        log.close()
        (found,) = log.recovery.unfinished.values()
        assert found.turns[0].images == IMAGES and found.turns[0].finish is None
