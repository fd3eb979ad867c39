"""Link balance: which logical cluster lives on which node of the machine, scored by the exact model (hd_moe IV-C2)."""

from jaxmoe.tune.link_balance.mapping import Budget as Budget
from jaxmoe.tune.link_balance.mapping import Mapping as Mapping
from jaxmoe.tune.link_balance.mapping import Question as Question
from jaxmoe.tune.link_balance.mapping import question_of as question_of
from jaxmoe.tune.link_balance.methods import annealing as annealing
from jaxmoe.tune.link_balance.methods import bayesian as bayesian
from jaxmoe.tune.link_balance.methods import descent as descent

METHODS = {"bayesian": bayesian, "annealing": annealing, "sinkhorn": descent}
