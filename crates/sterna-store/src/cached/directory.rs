//! Blocks in a directory, which the processes of a host share.
//!
//! A block is written under a temporary name and renamed, without a sync: a file that a crash left incomplete has another
//! digest, and is removed. An error of the directory is no error of the read: the block is fetched again.

use std::fs::{DirBuilder, File, FileTimes, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::error::StoreError;

/// First bytes of each file, with the version of their layout.
const MAGIC: &[u8; 8] = b"STERNAC1";
/// Bytes before the block: magic and digest.
const HEAD: usize = 8 + 32;
/// The file that is locked by the process that evicts.
const LOCK: &str = ".lock";
/// First letters of the names of unfinished files.
const TEMPORARY: &str = ".tmp-";
/// Age after which an unfinished file belongs to a process that has ended.
const STALE: Duration = Duration::from_secs(3600);
/// Age after which a use renews the time of a file.
const RENEWAL: Duration = Duration::from_secs(60);

/// A directory of blocks.
pub(super) struct Directory {
    path: PathBuf,
    limit: u64,
    /// Bytes that this process wrote since it last evicted.
    written: AtomicU64,
}

impl Directory {
    pub(super) fn open(path: &Path, limit: u64) -> Result<Self, StoreError> {
        let shown = path.display().to_string();
        // The blocks are the memory of guests: other users must not read them.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| StoreError::io(&shown, "mkdir", error))?;
        let directory = Self { path: path.to_owned(), limit, written: AtomicU64::new(u64::MAX) };
        directory.lock().map_err(|error| StoreError::io(&shown, "open", error))?;
        Ok(directory)
    }

    /// The block, if it is there with `length` bytes and its digest. A use makes it young.
    pub(super) fn get(&self, key: &[u8; 32], length: usize) -> Option<Vec<u8>> {
        let path = self.file(key);
        let mut file = File::open(&path).ok()?;
        let mut head = [0; HEAD];
        let mut content = Vec::with_capacity(length + 1);
        let read = file.read_exact(&mut head);
        let read = read.and_then(|()| (&mut file).take(length as u64 + 1).read_to_end(&mut content));
        if read.is_err() || content.len() != length || head != head_of(key, &content) {
            // Another process may have replaced it meanwhile. Then a good block is fetched once more.
            let _ = std::fs::remove_file(&path);
            return None;
        }
        let now = SystemTime::now();
        let used = file.metadata().and_then(|metadata| metadata.modified());
        if used.is_ok_and(|used| now.duration_since(used).is_ok_and(|age| age > RENEWAL)) {
            let _ = file.set_times(FileTimes::new().set_modified(now));
        }
        Some(content)
    }

    /// Whether a file of the block exists.
    pub(super) fn has(&self, key: &[u8; 32]) -> bool {
        self.file(key).exists()
    }

    /// Stores the block, and evicts old ones if the directory may be full.
    pub(super) fn put(&self, key: &[u8; 32], content: &[u8]) {
        let bytes = (HEAD + content.len()) as u64;
        if bytes > self.limit || self.write(key, content).is_err() {
            return;
        }
        let written = self.written.load(Ordering::Relaxed).saturating_add(bytes);
        self.written.store(written, Ordering::Relaxed);
        if written > self.limit / 16 {
            // Without the lock, another process evicts at this moment.
            if let Ok(_lock) = self.lock().and_then(|file| Ok(file.try_lock().map(|()| file)?)) {
                self.written.store(0, Ordering::Relaxed);
                self.evict();
            }
        }
    }

    fn write(&self, key: &[u8; 32], content: &[u8]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.file(key);
        let parent = path.parent().unwrap_or(&self.path);
        let temporary = parent.join(format!("{TEMPORARY}{}-{number}", std::process::id()));
        let create =
            || OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
        let opened = match create() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
                create()
            }
            opened => opened,
        };
        let mut file = opened?;
        let written = file.write_all(&head_of(key, content)).and_then(|()| file.write_all(content));
        let done = written.and_then(|()| std::fs::rename(&temporary, &path));
        if done.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        done
    }

    /// Removes the files that were not used for the longest time, down to seven eighths of the limit.
    fn evict(&self) {
        let (mut files, mut bytes, now) = (Vec::new(), 0, SystemTime::now());
        for parent in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            for entry in std::fs::read_dir(parent.path()).into_iter().flatten().flatten() {
                let Ok(metadata) = entry.metadata() else { continue };
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let is_temporary = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
                if is_temporary && now.duration_since(used).is_ok_and(|age| age > STALE) {
                    let _ = std::fs::remove_file(entry.path());
                } else if !is_temporary {
                    bytes += metadata.len();
                    files.push((used, metadata.len(), entry.path()));
                }
            }
        }
        if bytes <= self.limit {
            return;
        }
        files.sort();
        for (_, length, path) in files {
            if bytes <= self.limit / 8 * 7 {
                return;
            }
            if std::fs::remove_file(path).is_ok() {
                bytes -= length;
            }
        }
    }

    fn lock(&self) -> io::Result<File> {
        let path = self.path.join(LOCK);
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
    }

    fn file(&self, key: &[u8; 32]) -> PathBuf {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.path.join(&name[..2]).join(name)
    }
}

/// Magic, and the digest over the block's key and content.
fn head_of(key: &[u8; 32], content: &[u8]) -> [u8; HEAD] {
    let digest = blake3::Hasher::new_keyed(key).update(content).finalize();
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(MAGIC);
    head[8..].copy_from_slice(digest.as_bytes());
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(directory: &Path) -> Vec<PathBuf> {
        let parents = std::fs::read_dir(directory).unwrap().flatten();
        parents
            .filter_map(|parent| std::fs::read_dir(parent.path()).ok())
            .flatten()
            .flatten()
            .map(|it| it.path())
            .collect()
    }

    #[test]
    fn damaged_short_and_exchanged_files_are_removed_and_not_used() {
        let place = tempfile::tempdir().unwrap();
        let kept = Directory::open(place.path(), 1 << 20).unwrap();
        let (one, two) = ([1; 32], [2; 32]);
        kept.put(&one, b"first block");
        kept.put(&two, b"other block");
        assert_eq!(kept.get(&one, 11).unwrap(), b"first block");
        assert!(kept.get(&one, 10).is_none(), "another length");

        kept.put(&one, b"first block");
        let (path, other) = (kept.file(&one), kept.file(&two));
        let whole = std::fs::read(&path).unwrap();
        for damage in 0..whole.len() {
            let mut changed = whole.clone();
            changed[damage] ^= 4;
            std::fs::write(&path, changed).unwrap();
            assert!(kept.get(&one, 11).is_none() && !path.exists(), "byte {damage}");
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(kept.get(&one, 11).is_none());
        std::fs::copy(&other, &path).unwrap();
        assert!(kept.get(&one, 11).is_none(), "the block of another key");
        assert_eq!(kept.get(&two, 11).unwrap(), b"other block");
    }

    #[test]
    fn files_that_were_not_used_for_the_longest_time_are_removed_first() {
        let place = tempfile::tempdir().unwrap();
        let limit = 64 << 10;
        let kept = Directory::open(place.path(), limit).unwrap();
        let put = |number: u8| {
            kept.put(&[number; 32], &[number; 1000]);
            let file = File::open(kept.file(&[number; 32])).unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + u64::from(number));
            file.set_times(FileTimes::new().set_modified(time)).unwrap();
        };
        (0..50).for_each(put);
        assert!(kept.get(&[0; 32], 1000).is_some(), "a use makes it young");
        (50..200).for_each(put);

        let bytes: u64 = files(place.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(bytes <= limit + limit / 16, "{bytes}");
        assert!(kept.has(&[0; 32]) && !kept.has(&[1; 32]) && kept.has(&[199; 32]));
        kept.put(&[7; 32], &vec![0; limit as usize]);
        assert!(!kept.has(&[7; 32]), "longer than the limit");
    }

    #[test]
    fn unfinished_file_of_a_process_that_ended_is_removed() {
        let place = tempfile::tempdir().unwrap();
        Directory::open(place.path(), 1 << 20).unwrap().put(&[1; 32], b"x");
        let left = place.path().join("01/.tmp-1-1");
        std::fs::write(&left, b"half").unwrap();
        File::open(&left).unwrap().set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH)).unwrap();

        // The first write of a process looks at the whole directory.
        Directory::open(place.path(), 1 << 20).unwrap().put(&[2; 32], b"y");

        assert!(!left.exists());
    }
}
