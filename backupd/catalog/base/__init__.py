"""The database under the catalog: connection, transactions, migrations, pages, the leader."""
