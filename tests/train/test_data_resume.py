"""The order of the data: the same after a resume at any step, disjoint over ranks."""

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from qat.errors import ConfigError
from qat.train.data import build_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),  # Lightning on recent torch
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
DATA = {"name": "digits", "augment": "shift", "batch_size": 250}  # 4 batches an epoch


class Recorder(LightningModule):
    """Keeps the bytes of every training batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, index):
        images, labels = batch
        self.seen.append((self.current_epoch, images.numpy().tobytes(), labels.tolist()))
        return self.weight * 0

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEverywhere(Callback):
    """A checkpoint at each of the moments at which Lightning's own callback saves."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")

    def on_validation_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"val={trainer.current_epoch}.ckpt")

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"end={trainer.current_epoch}.ckpt")


def fit(folder, workers=0, checkpoint=None, data=DATA, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callbacks, module = [SaveEverywhere(folder)], Recorder()
    trainer = Trainer(max_epochs=3, accelerator="cpu", devices=1, num_sanity_val_steps=0, callbacks=callbacks, **quiet, **options)
    trainer.fit(module, datamodule=build_data(data | {"workers": workers}, seed=1), ckpt_path=checkpoint, weights_only=True)
    return module.seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All batches of an uninterrupted run, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder), folder


def test_an_uninterrupted_run_sees_another_order_in_every_epoch(whole):
    seen, _ = whole
    assert [epoch for epoch, _, _ in seen] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({labels for labels in map(str, (labels for _, _, labels in seen))}) == 12


@pytest.mark.parametrize("step", [1, 4, 5, 6, 8, 11])
def test_resume_at_any_step_goes_on_with_the_remaining_batches(whole, tmp_path, step):
    seen, folder = whole
    assert fit(tmp_path, checkpoint=folder / f"step={step}.ckpt") == seen[step:]


@pytest.mark.parametrize("name", ["end=0", "val=0", "end=1", "val=1"])
def test_resume_at_the_end_of_an_epoch_starts_the_next(whole, tmp_path, name):
    seen, folder = whole
    assert fit(tmp_path, checkpoint=folder / f"{name}.ckpt") == seen[4 * (int(name[-1]) + 1) :]


@pytest.mark.parametrize("name", ["step=6", "end=0"])
def test_resume_with_workers_that_fetch_ahead(whole, tmp_path, name):
    seen, folder = whole
    start = 6 if name == "step=6" else 4
    assert fit(tmp_path, workers=2, checkpoint=folder / f"{name}.ckpt") == seen[start:]


def test_resume_of_a_resumed_run(whole, tmp_path):
    seen, folder = whole
    fit(tmp_path, workers=1, checkpoint=folder / "step=5.ckpt")
    assert fit(tmp_path / "again", checkpoint=tmp_path / "step=7.ckpt") == seen[7:]


def test_resume_when_epochs_are_cut_short(tmp_path):
    seen = fit(tmp_path, limit_train_batches=3)
    assert fit(tmp_path / "a", checkpoint=tmp_path / "step=3.ckpt", limit_train_batches=3) == seen[3:]
    assert fit(tmp_path / "b", checkpoint=tmp_path / "step=4.ckpt", limit_train_batches=3) == seen[4:]


@pytest.mark.parametrize(("change", "message"), [({"batch_size": 200}, "batch_size 200"), ({"val_fraction": 0.3}, "samples ")])
def test_resume_within_an_epoch_of_another_order_is_refused(whole, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, checkpoint=whole[1] / "step=5.ckpt", data=DATA | change)


@pytest.mark.parametrize("workers", [0, 2])
def test_state_counts_batches_handed_out(workers):
    loader = build_data(DATA | {"workers": workers}, 1).train_dataloader()
    loader.sampler.set_epoch(4)
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (4, 2)
    rest = list(batches)
    other = build_data(DATA, 1).train_dataloader()
    other.load_state_dict(state)
    assert other.state_dict() == state  # also before the first batch
    other.sampler.set_epoch(4)
    assert len(other) == len(first) + len(rest) == 4
    assert all(torch.equal(a[0], b[0]) for a, b in zip(rest, other, strict=True))
    assert len(list(other)) == 4  # only the first iteration is shortened


def ranks(monkeypatch, world):
    for rank in range(world):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        yield rank


@pytest.mark.parametrize("world", [2, 3])
def test_training_shards_are_disjoint_and_equally_long(monkeypatch, world):
    data, shards = build_data({"name": "digits", "augment": "none", "batch_size": 100}, 0), []
    for _ in ranks(monkeypatch, world):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(2)
        assert len(loader) == 1146 // world // 100
        shards.append(list(loader.sampler))
    assert len({len(shard) for shard in shards}) == 1
    pairs = [pair for shard in shards for pair in shard]
    assert len(set(pairs)) == len(pairs) == 1146 // world * world and {epoch for epoch, _ in pairs} == {2}


@pytest.mark.parametrize(("world", "batch_size"), [(2, 256), (2, 225), (4, 112), (4, 56), (7, 64)])
def test_evaluation_sees_every_picture_once_in_equally_many_batches(monkeypatch, world, batch_size):
    data, counts, pairs = build_data({"name": "digits", "eval_batch_size": batch_size}, 0), set(), []
    data.splits.test.labels = data.splits.test.labels[:449]
    for _ in ranks(monkeypatch, world):
        loader = data.test_dataloader()
        counts.add(len(list(loader.batch_sampler)))
        pairs += list(loader.sampler)
    assert len(counts) == 1
    assert sorted(pairs) == [(0, i) for i in range(449)]


def test_fewer_pictures_than_ranks_is_an_error(monkeypatch):
    data = build_data({"name": "digits"}, 0)
    for _ in ranks(monkeypatch, 2000):
        with pytest.raises(ConfigError, match="2000 ranks"):
            data.train_dataloader()
        break
