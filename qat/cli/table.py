"""The table that `python train.py` prints."""

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qat.cli.folders import packaged
from qat.cli.recipes import Recipe, lineage, runnable, sweep_of
from qat.errors import ConfigError

USAGE = "python train.py recipe=NAME [GROUP=OPTION ...] [KEY=VALUE ...]"


def strategy_of(name: str, recipes: dict[str, Recipe]) -> str:
    """The fold the recipe chooses: the nearest `override /fold` in its lineage, else the default of configs/train.yaml; of a recipe
    that sweeps over them "all" or their number."""
    try:
        section = sweep_of(name, recipes)
        swept = section["over"].get("fold") if isinstance(section, dict) and isinstance(section.get("over"), dict) else None
        if isinstance(swept, list):
            known = {path.stem for path in (packaged("configs") / "fold").glob("*.yaml")}
            return "all" if known <= set(map(str, swept)) else f"{len(swept)} of them"
        chosen = [recipe.choices["fold"] for recipe in lineage(name, recipes) if "fold" in recipe.choices]
    except ConfigError as error:
        return f"cannot be read: {error.found}"
    option = chosen[0] if chosen else "bn_correction"
    path = packaged("configs") / "fold" / f"{option}.yaml"
    return str(OmegaConf.load(path).name) if path.is_file() else f"unknown fold {option}"


def print_table(recipes: dict[str, Recipe]) -> None:
    """One row a recipe; the user's own are marked with a star."""
    table = Table("recipe", "what", "strategy", "measured", box=None, pad_edge=False, header_style="bold")
    for name, recipe in sorted(runnable(recipes).items()):
        header = recipe.header
        row = (name + " *" * recipe.own, header.get("what", ""), strategy_of(name, recipes), header.get("measured", ""))
        table.add_row(*map(Text, row))
    console = Console()
    # not on a terminal there is no width to keep to, and names must stay whole for grep
    console = console if console.is_terminal else Console(width=200)
    console.print(table)
    console.print(f"\n{USAGE}", markup=False)
    console.print("python train.py --help lists groups and options; * are your own, from ./recipes", markup=False)
