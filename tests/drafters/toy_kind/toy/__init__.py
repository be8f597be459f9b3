"""An autoregressive drafter of one small recurrent network."""
