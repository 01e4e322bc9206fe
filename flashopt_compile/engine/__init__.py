"""How a step is carried out: storage, layout, the step itself, and the plan that runs it again."""
