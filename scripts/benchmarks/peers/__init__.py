"""Other engines, which ``bench engine`` measures beside Baton's."""
