"""The built-in town hall: text, votes and the truth behind them, for demos, tests and benchmarks."""

from pluralign.votes.town_hall.townhall import Answers, Candidates, TownHall, answers, candidates, town_hall

__all__ = ["Answers", "Candidates", "TownHall", "answers", "candidates", "town_hall"]
