"""When something is due: the calendar, missed runs, the timetable."""
