//! Dynamo's records in a folder that its processes share, as its `storage/kv/file.rs` keeps them.
//!
//! Whoever may write there gets no more than that from a daemon that may write elsewhere too: no link is
//! followed below the root, only regular files are read, and nothing that exists is ever opened to write.
//! Everything here blocks.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{OFlag, RenameFlags, openat, renameat2};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::records::{BUCKETS, Mark, Record};
use super::stores::StoreError;

/// Largest file that is read, in bytes. A model's card has some kilobytes.
const MAX_FILE: u64 = 4 << 20;
/// What Dynamo passes over in its folders.
const TEMPORARY: &str = ".tmp_";

/// What one look found: by the path of each file below the root, as
/// `v1/instances/dynamo%2Fbackend%2Fgenerate%2F1f63`, what says that it has changed, and its record.
pub(super) type Files = BTreeMap<String, (Stamp, Option<Record>)>;

/// Inode number, length in bytes, and when it was last written or touched.
pub(super) type Stamp = (u64, u64, Option<SystemTime>);

/// Every file. What has not changed since the last look is not read again.
///
/// # Errors
/// The root is not there, or something cannot be looked into.
pub(super) fn look(root: &Path, last: &Files) -> Result<Files, StoreError> {
    let mut found = Files::new();
    if fs::metadata(root).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Err(StoreError::Absent(root.display().to_string()));
    }
    for bucket in BUCKETS {
        let folder = match open(root, bucket) {
            Ok(folder) => folder,
            // The first worker makes it.
            Err(Errno::ENOENT) => continue,
            Err(error) => return Err(failed(root, bucket)(error.into())),
        };
        let entries = fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd())).map_err(failed(root, bucket))?;
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            // Of a link: the link's own. One that is gone by now is none.
            let Ok(metadata) = entry.metadata() else { continue };
            if name.starts_with(TEMPORARY) {
                continue;
            }
            let key = format!("{bucket}/{name}");
            let stamp = (metadata.ino(), metadata.len(), metadata.modified().ok());
            let known = last.get(&key).filter(|(before, _)| *before == stamp);
            let record = match known {
                Some((_, record)) => Ok(record.clone()),
                None => read_in(&folder, &key, &name),
            };
            // What cannot be read now is tried again with the next look.
            if let Ok(record) = record {
                found.insert(key, (stamp, record));
            }
        }
    }
    Ok(found)
}

/// These files, as far as they are there.
pub(super) fn read(root: &Path, keys: &[String]) -> Result<Vec<Record>, StoreError> {
    let mut records = Vec::new();
    for key in keys {
        records.extend(read_one(root, key).map_err(failed(root, key))?);
    }
    Ok(records)
}

/// Deletes those of these files that are still what they were; they as they stood then.
pub(super) fn unlink(root: &Path, records: &[Record]) -> Result<Vec<Record>, StoreError> {
    let mut deleted = Vec::new();
    for known in records {
        let Some(record) = read_one(root, &known.key).map_err(failed(root, &known.key))? else { continue };
        if !record.is_still(known) {
            continue;
        }
        let gone = place(root, &record.key).and_then(|(folder, name)| remove(&folder, name));
        if gone.map_err(failed(root, &known.key))? {
            deleted.push(record);
        }
    }
    Ok(deleted)
}

/// Writes those of these files that are not there; they as they stand now.
pub(super) fn write(root: &Path, records: &[Record]) -> Result<Vec<Record>, StoreError> {
    let mut written = Vec::new();
    for record in records {
        written.extend(put(root, record).map_err(failed(root, &record.key))?);
    }
    Ok(written)
}

fn failed(root: &Path, key: &str) -> impl FnOnce(io::Error) -> StoreError {
    let path = root.join(key).display().to_string();
    move |source| StoreError::File { path, source }
}

/// A folder below the root, through no link.
fn open(root: &Path, bucket: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut folder = nix::fcntl::open(root, flags, Mode::empty())?;
    for part in bucket.split('/') {
        folder = openat(&folder, part, flags | OFlag::O_NOFOLLOW, Mode::empty())?;
    }
    Ok(folder)
}

/// The folder of a key, and its name there.
fn place<'a>(root: &Path, key: &'a str) -> io::Result<(OwnedFd, &'a str)> {
    let (bucket, name) = key.rsplit_once('/').ok_or(io::ErrorKind::InvalidInput)?;
    Ok((open(root, bucket)?, name))
}

fn read_one(root: &Path, key: &str) -> io::Result<Option<Record>> {
    match place(root, key) {
        Ok((folder, name)) => read_in(&folder, key, name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// None: there is no such regular file, or it is no record.
fn read_in(folder: &OwnedFd, key: &str, name: &str) -> io::Result<Option<Record>> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let file = match openat(folder, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // A link; a socket.
        Err(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Ok(None);
    }
    let mut value = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut value)?;
    Ok(Record::read(key, &value, 0, 0).map(|record| Record { file: Some(Mark::of(&metadata)), ..record }))
}

/// Whether it was there.
fn remove(folder: &OwnedFd, name: &str) -> io::Result<bool> {
    match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) => Ok(true),
        Err(Errno::ENOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Appears with all of its content at once, as Dynamo's own files do, and never over another one: none
/// then. Its worker has to be able to write to it: it touches it to keep it.
fn put(root: &Path, record: &Record) -> io::Result<Option<Record>> {
    let (folder, name) = place(root, &record.key)?;
    let temporary = format!("{TEMPORARY}lastgasp_{:x}_{}", record.instance, std::process::id());
    // Of an earlier try, or a trap.
    remove(&folder, &temporary)?;
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut file = File::from(openat(&folder, temporary.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
    let written = (|| {
        file.write_all(&record.value)?;
        file.set_permissions(Permissions::from_mode(record.file.as_ref().map_or(0o644, |mark| mark.mode)))?;
        let made = file.metadata()?;
        if let Some(Mark { owner: (user, group), .. }) = record.file
            && (made.uid(), made.gid()) != (user, group)
        {
            std::os::unix::fs::fchown(&file, Some(user), Some(group))?;
        }
        match renameat2(&folder, temporary.as_str(), &folder, name, RenameFlags::RENAME_NOREPLACE) {
            Ok(()) => Ok(Some(Record { file: Some(Mark::of(&file.metadata()?)), ..record.clone() })),
            Err(Errno::EEXIST) => Ok(None),
            Err(error) => Err(error.into()),
        }
    })();
    if !matches!(written, Ok(Some(_))) {
        let _ = remove(&folder, &temporary);
    }
    written
}

impl Mark {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            // Not every file system knows.
            born: metadata.created().ok(),
            owner: (metadata.uid(), metadata.gid()),
            mode: metadata.mode() & 0o777,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    const KEY: &str = "v1/instances/dynamo%2Fbackend%2Fgenerate%2Fa";
    const VALUE: &str = r#"{"type":"Endpoint","instance_id":10}"#;

    fn root() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("records");
        fs::create_dir_all(root.join("v1/instances")).unwrap();
        (folder, root)
    }

    fn record() -> Record {
        Record::read(KEY, VALUE.as_bytes(), 0, 0).unwrap()
    }

    #[test]
    fn a_link_in_the_way_of_what_is_written_is_not_followed() {
        let (folder, root) = root();
        let precious = folder.path().join("shadow");
        fs::write(&precious, "precious").unwrap();
        let trap = root.join(format!("v1/instances/.tmp_lastgasp_a_{}", std::process::id()));
        symlink(&precious, &trap).unwrap();

        assert!(put(&root, &record()).unwrap().is_some());

        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
        assert_eq!(fs::read_to_string(root.join(KEY)).unwrap(), VALUE);
        assert!(root.join(KEY).symlink_metadata().unwrap().is_file() && trap.symlink_metadata().is_err());
        // Nor is one in the place of the folder.
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(root.join("v1/instances"), &elsewhere).unwrap();
        fs::remove_file(elsewhere.join("dynamo%2Fbackend%2Fgenerate%2Fa")).unwrap();
        symlink(&elsewhere, root.join("v1/instances")).unwrap();
        assert!(put(&root, &record()).is_err() && look(&root, &Files::new()).is_err());
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_regular_file_is_passed_over_without_waiting() {
        let (folder, root) = root();
        let outside = folder.path().join("outside");
        fs::write(&outside, VALUE).unwrap();
        symlink(&outside, root.join(KEY)).unwrap();
        let pipe = root.join("v1/instances/dynamo%2Fbackend%2Fgenerate%2Fb");
        nix::unistd::mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();

        let found = look(&root, &Files::new()).unwrap();

        assert!(found.len() == 2 && found.values().all(|(_, record)| record.is_none()), "{found:?}");
        assert_eq!(unlink(&root, &[record()]).unwrap(), []);
    }

    #[test]
    fn a_successor_of_the_same_name_is_not_deleted_for_it() {
        let (_folder, root) = root();
        let first = put(&root, &record()).unwrap().unwrap();
        // As Dynamo writes one; the first is still there, so that its inode cannot be the same.
        fs::write(root.join("v1/instances/.tmp_x"), VALUE).unwrap();
        fs::rename(root.join("v1/instances/.tmp_x"), root.join(KEY)).unwrap();

        assert_eq!(unlink(&root, std::slice::from_ref(&first)).unwrap(), []);

        assert_eq!(fs::read_to_string(root.join(KEY)).unwrap(), VALUE);
        // To touch it makes it no other one.
        let present = read(&root, &[KEY.to_owned()]).unwrap();
        File::options().write(true).open(root.join(KEY)).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(unlink(&root, &present).unwrap(), present);
    }

    #[test]
    fn a_root_that_is_not_there_is_no_empty_one() {
        let (folder, _root) = root();
        let error = look(&folder.path().join("absent"), &Files::new()).unwrap_err();
        assert!(matches!(error, StoreError::Absent(_)), "{error}");
    }
}
