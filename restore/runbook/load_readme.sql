-- Written by backupd. Load everything with
--
--     sh @script@ OPTIONS
--
-- in this folder. OPTIONS are those of the client, @client@: --defaults-file=FILE (first), --host=, --user= and so on.
-- CLIENT='/path/to/@client@ OPTIONS' in the environment names another program.
--
-- Tables, routines, views, triggers and events that exist already are errors, and nothing is overwritten: the script
-- stops at the first error with an exit code that is not 0, so rows get only into tables that it has made itself. Drop
-- what it had made (it names each file), then call it again. Schemas that exist stay as they are.
--
-- Accounts that are named as definers should be there first: a view that reads the view of a missing one is refused.
--
-- Each file can be loaded alone, too, into any schema (@client@ --binary-mode --comments SCHEMA < FILE): definition.sql
-- creates a table, data-*.sql are its rows, triggers.sql its triggers. Create those last, or the rows fire them. Make
-- sure that definition.sql created its table: rows go into whatever has its name.

SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'this file only explains, and nothing was loaded: call sh @script@';
