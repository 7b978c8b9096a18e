"""How good a trained model is: loss by position, needle maps, recall. `nsa eval` is the command."""
