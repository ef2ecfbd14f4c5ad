"""The package away from its clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = "import sys; from qat.cli.train import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_wheel_finds_its_recipes_and_those_of_the_user(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT], check=True, capture_output=True, timeout=600
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    user = tmp_path / "user"
    (user / "recipes").mkdir(parents=True)
    (user / "recipes" / "mine.yaml").write_text("defaults:\n  - base/mbv1\n  - override /fold: static\nseed: 5\n")

    def run(*words):
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run([sys.executable, "-c", CODE, *words], cwd=user, env=env, capture_output=True, text=True, timeout=120)

    table = run()
    assert table.returncode == 2 and "mine *" in table.stdout and "mbv1_bncorr" in table.stdout
    config = run("recipe=mine", "--cfg", "job")
    assert config.returncode == 0 and "name: static" in config.stdout and "seed: 5" in config.stdout
