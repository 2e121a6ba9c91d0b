if [ ! -e cgroup.controllers ]; then
  setpriv --reuid=1000 --clear-groups sh -c 'kill -CONT -1'
  exit 0
fi
for group in $groups; do
  echo 0 >$group/cgroup.freeze
done
