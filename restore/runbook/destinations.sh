# --- names
# shellcheck disable=SC2043 # several backups stand there
for backup in @chain@; do
    grep -oE '[0-9a-f]{64}-[0-9a-f]{16}' "@servers@@server@/$backup/manifest.json"
done | LC_ALL=C sort -u > objects.txt

# --- check
while read -r object; do
    test -e "objects/$(printf %.2s "$object")/$object" || { echo "$object has not come" >&2; exit 1; }
done < objects.txt

# --- s3_lists
set -eu
: "${REPOSITORY:?an empty or missing folder with room for the files}"
case $REPOSITORY in /*) ;; *) echo 'REPOSITORY must begin with a slash' >&2; exit 1 ;; esac
mkdir -p "$REPOSITORY"
@settings@
FROM=@from@
cd "$REPOSITORY"
# shellcheck disable=SC2043 # several backups stand there
for backup in @chain@; do
    aws@endpoint@ s3 cp --recursive --only-show-errors \
        "$FROM/@servers@@server@/$backup/" "@servers@@server@/$backup/"
done
@names@
sed 's|^\(..\)|objects/\1/\1|' objects.txt > objects-keys.txt

# --- s3_addressing
printf '[default]\ns3 =\n    addressing_style = %s\n' @addressing@ > "$REPOSITORY/aws-config"
export AWS_CONFIG_FILE="$REPOSITORY/aws-config"

# --- s3_thaw
: "${TIER:=Standard}"
: "${DAYS:=7}"
export TIER DAYS
cat > thaw.sh << 'END_OF_SCRIPT'
@thaw_one@
END_OF_SCRIPT
xargs -P 8 -n 1 sh thaw.sh < @keys@

# --- s3_thaw_one
said=$(aws@endpoint@ s3api restore-object --bucket @bucket@ --key @prefix@"$1" --restore-request \
    "{\"Days\":$DAYS,\"GlacierJobParameters\":{\"Tier\":\"$TIER\"}}" 2>&1) && exit 0
case $said in
    *RestoreAlreadyInProgress*) ;;
    *'current storage class'*) ;; # it is not in an archive class
    *) echo "$1: $said" >&2; exit 1 ;;
esac

# --- s3_frozen
cat > frozen.sh << 'END_OF_SCRIPT'
@frozen_one@
END_OF_SCRIPT
xargs -P 8 -n 1 sh frozen.sh < @keys@ > frozen.txt
wc -l < frozen.txt

# --- s3_frozen_one
found=$(aws@endpoint@ s3api head-object --bucket @bucket@ --key @prefix@"$1" --output text \
    --query '[StorageClass,Restore]') || exit 1
case $found in
    *'ongoing-request="false"'*) ;;
    *GLACIER* | *DEEP_ARCHIVE*) echo "$1" ;;
esac

# --- s3_fetch
: "${SMALL:=5000}"
cat > fetch.sh << 'END_OF_SCRIPT'
@fetch_folder@
END_OF_SCRIPT
found=$(aws@endpoint@ s3api list-objects-v2 --bucket @bucket@ --prefix @prefix@objects/ --output json \
    --max-items "$SMALL" --query 'length(Contents)')
if test "$found" -lt "$SMALL"; then
    xargs -P 4 -n 200 sh fetch.sh '' < objects.txt
else
    # shellcheck disable=SC2016,SC2086 # the shell that xargs starts expands it, into words
    cut -c1-2 objects.txt | uniq | xargs -P 4 -I {} sh -c 'sh fetch.sh {}/ $(grep "^{}" objects.txt)'
fi
@check@

# --- s3_fetch_folder
folder=$1
shift
for object in "$@"; do
    shift
    test -e "objects/$(printf %.2s "$object")/$object" || set -- "$@" --include "*$object"
done
test $# -eq 0 || aws@endpoint@ s3 cp --recursive --only-show-errors@force@ --exclude '*' "$@" \
    @from@/objects/"$folder" objects/"$folder"

# --- s3_log_keys
aws@endpoint@ s3api list-objects-v2 --bucket @bucket@ --prefix @prefix@@logs@ --output text \
    --query 'Contents[].[Key]' | grep -oE '@logs@.*/part-[^/]*$' > log-keys.txt

# --- s3_logs
aws@endpoint@ s3 cp --recursive --only-show-errors@force@ "$FROM/@logs@" "@logs@"

# --- sftp_fetch
set -eu
: "${REPOSITORY:?an empty or missing folder with room for the files}"
: "${SSH_KEY:?the file of the private key}"
: "${SSH_OPTIONS:=}"
case $REPOSITORY in /*) ;; *) echo 'REPOSITORY must begin with a slash' >&2; exit 1 ;; esac
mkdir -p "$REPOSITORY"
cd "$REPOSITORY"
mkdir -p @servers@@server@
# shellcheck disable=SC2086 # options are several words
sftp -q -b - -P @port@ -i "$SSH_KEY" $SSH_OPTIONS @account@ << 'END_OF_BATCH' > /dev/null
@enter@
@gets@
END_OF_BATCH
@names@
{
    printf '%s\n' @enter_word@
    while read -r object; do
        file=objects/$(printf %.2s "$object")/$object
        mkdir -p "${file%/*}"
        test -e "$file" || printf 'get %s %s.part\n!mv %s.part %s\n' "$file" "$file" "$file" "$file"
    done < objects.txt
} > batch.txt
# shellcheck disable=SC2086 # options are several words
sftp -q -b batch.txt -P @port@ -i "$SSH_KEY" $SSH_OPTIONS @account@ > /dev/null
@check@

# --- sftp_logs
mkdir -p @binlogs@
# shellcheck disable=SC2086 # options are several words
sftp -q -b - -P @port@ -i "$SSH_KEY" $SSH_OPTIONS @account@ << 'END_OF_BATCH' > /dev/null
@enter@
get -r @logs@ @binlogs@
END_OF_BATCH
