"""How the zoo's networks are made: tasks, grid, trainer, engines, the code of a step."""
