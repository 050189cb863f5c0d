"""From the body of a request to what its nodes are sent: prompts, parameters, grammars."""
