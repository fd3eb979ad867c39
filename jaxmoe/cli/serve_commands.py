"""`jaxmoe serve` and its verbs of two words, with their options; what each does is in the module of its name."""

from pathlib import Path
from typing import Annotated

import typer

from jaxmoe.cli import options
from jaxmoe.cli.session import runs
from jaxmoe.extras import check_parquet
from jaxmoe.sweep.study import read_study

KernelProfile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="DIR",
        help="A kernel profile in LLMServingSim's layout, whose times count in place of the machine's.",
        show_default=False,
    ),
]
Rates = Annotated[
    str,
    typer.Option("--rates", metavar="R,R,..", help="Mean rates of arrivals, requests/s.", show_default=False),
]


@runs("serve", scenario=True, writes=("requests.csv", "steps.csv", "timeline.json"))
def serve(
    config: options.Config,
    out: options.Out,
    profile: KernelProfile = None,
    overrides: options.Overrides = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve requests over time: what users wait for, the highest rate within their limits, and what forbids more.

    The scenario says which requests come and which engines serve them (section serving). Steps take what the machine's
    fitted kernels take, or those of a profile. Requests, steps, a timeline for trace viewers and curves go to DIR.

    Example: jaxmoe serve served/qwen3-30b-a3b_rtxpro6000_2 --out runs/served
    """


@runs("serve_rates", scenario=True, check=lambda _: check_parquet("jaxmoe serve rates"), resumes=True)
def serve_rates(
    config: options.Config,
    rates: Rates,
    out: options.Out,
    profile: KernelProfile = None,
    overrides: options.Overrides = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve the same requests at several rates: what users wait for, and how many are served within their limits.

    Gaps between requests are longer or shorter alike. A run that was stopped goes on where it was.

    Example: jaxmoe serve rates served/qwen3-30b-a3b_rtxpro6000_2 --rates 2,4,6,8 --out runs/rates
    """


@runs("serve_best", check=read_study)
def serve_best(
    config: options.StudyFile,
    out: options.Out,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the deployment that serves most requests a second and GPU within the limits of its users.

    A study names a scenario with serving, and axes over deployment and over the engines of serving. Deployments are
    tried one after another at a rate a little above the best one's so far, each for as long as it may meet the limits.

    Example: jaxmoe serve best studies/serving/best.yaml --out runs/best
    """
