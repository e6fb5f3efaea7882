"""The app's pages, and the frame around them. Each page reads the frame's choices, calls, and shows."""
