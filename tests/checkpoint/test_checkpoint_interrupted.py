"""An exception, as of Ctrl-C, at any line of a save: the next one, to the same folder, is made."""

import shutil
from pathlib import Path

import pytest
import torch
from gloo import fake_world
from interrupting import Bomb, Interrupted
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_a_save_that_was_interrupted_is_made_again(error, tmp_path):
    folder = tmp_path / "saved"
    with fake_world(1):
        model = FSDP(nn.Linear(3, 3))  # saved 500 times: more units come to no other line
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        files = [str(Path(checkpoint.__file__).with_name("saving.py"))]
        checkpoint.save(folder, model, optimizer)
        with Bomb(files) as listing:
            checkpoint.save(folder, model, optimizer, overwrite=True)
        places = [place for place in listing.places if place[3] == 1]  # each line once
        assert len(places) > 100
        for place in places:
            bomb = Bomb(files, place, error)
            with pytest.raises((Interrupted, KeyboardInterrupt, checkpoint.CheckpointError)), bomb:
                checkpoint.save(folder, model, optimizer, overwrite=True)
            assert bomb.exploded
            shutil.rmtree(folder)
            checkpoint.save(folder, model, optimizer)
            checkpoint.load(folder, model, optimizer)
