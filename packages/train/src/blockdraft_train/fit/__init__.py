"""`blockdraft fit`: survey of target and machine, plan, the plan's commands, and the drafter's card."""
