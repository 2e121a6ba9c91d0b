"""Tasks of OpenComputer, set up and scored by its own code in the guest."""
