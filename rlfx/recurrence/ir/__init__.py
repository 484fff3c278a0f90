"""The program: equations of one timestep, traced from the user's function; access relations."""
