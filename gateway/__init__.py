"""The gateway: HTTP and text towards the user, the control plane towards the nodes, and the choice of a pair."""
