# --- known
sed -n -E '/^(@known@) *= *@plain@$/p; /^plugin[-_]load([-_]add)? *= *@plugin@ *$/p; \|^plugin[-_]dir *= *"?@folders@"?$|p; /^(loose[-_])?file[-_]key[-_]management[-_]/p' "@folder@/backup-my.cnf"

# --- option_file
mkdir -p "$WORK/run/tmp"
{
    echo '[mysqld]'
    # A server that was unpacked into some folder does not find its texts by itself.
    program=$(readlink -f "$(command -v @server@)")
    for base in "${program%/*/*}" "${program%/*}"; do
        for folder in share share/mysql share/mariadb; do
            case $program in /usr/* | /bin/* | /sbin/*) continue ;; esac
            if [ -f "$base/$folder/english/errmsg.sys" ]; then
                printf 'basedir = %s
lc_messages_dir = %s
' "$base" "$base/$folder"
                break 2
            fi
        done
    done
    @known@
    cat << END_OF_OPTIONS
@options@
END_OF_OPTIONS
} > "$WORK/run/my.cnf"
chown -R "$OWNER:" "$WORK/run"

# --- begun
@environment@@server@ --defaults-file="$WORK/run/my.cnf" --user="$OWNER" &
server=$!
until @admin@ @client@ ping 2> /dev/null; do
    kill -0 "$server" || { tail -n 20 "$WORK/run/error.log" >&2; exit 1; }
    sleep 1
done
