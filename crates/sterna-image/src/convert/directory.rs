//! Snapshots of other VMMs, which are directories of files: Firecracker's and Cloud Hypervisor's.
//!
//! The memory file becomes a block, and every other file is kept byte for byte. A conversion back writes the same files.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_store::{Block, ImageWriter, PAGE_BYTES, Piece, Place, Recipe, StoredImage, publish};

use super::framed::bytes::push_bytes;
use super::framed::writer::writer_at;
use super::memory::{MemoryPart, store_memory};
use super::request::{ConvertOptions, threads};
use crate::ImageError;
use crate::crew;
use crate::read::open::open_stored;
use crate::read::{Access, ReadAt};

/// Limit of a file that is not memory, in bytes. It is in memory while it is copied.
const FILE_MOST: u64 = 1 << 30;
/// Bytes that a thread writes in one step.
const UNIT: u64 = 2 << 20;
/// The memory of Cloud Hypervisor's snapshots.
const RANGES: &str = "memory-ranges";
const FIRECRACKER: &str = "firecracker";
const CLOUD_HYPERVISOR: &str = "cloud-hypervisor";
/// The kind of images whose files are streams and not a directory.
const QEMU: &str = "qemu";

/// What a conversion of a directory wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertedDirectory {
    /// The VMM: `firecracker` or `cloud-hypervisor`.
    pub kind: String,
    /// Bytes of memory.
    pub ram_bytes: u64,
    /// Bytes of the image, or of the written files.
    pub bytes: u64,
}

/// A snapshot's files.
struct Snapshot {
    kind: &'static str,
    memory: String,
    others: Vec<String>,
}

/// Converts the snapshot in the directory `from` to an image in Sterna's own format at `to`.
///
/// If `is_diff`, the holes of the memory file are pages that did not change since the base
/// ([`FrameOptions::base`](super::FrameOptions::base)), as Firecracker's snapshots of type `Diff` have them.
///
/// # Errors
/// [`ImageError::Unsupported`] if the directory is no snapshot, [`ImageError::Request`] if a base is missing. Nothing is visible at `to` then.
pub fn convert_directory(
    from: &Path,
    to: &Path,
    is_diff: bool,
    options: &ConvertOptions,
) -> Result<ConvertedDirectory, ImageError> {
    let snapshot = Snapshot::find(from)?;
    if is_diff && options.frames.base.is_none() {
        let text = "a diff snapshot has only the pages that changed: give the image of the snapshot before it as the base";
        return Err(ImageError::Request(text.to_owned()));
    }
    let path = from.join(&snapshot.memory);
    let name = path.display().to_string();
    let memory = File::open(&path).map_err(|error| ImageError::io(&name, "open", error))?;
    let stamp = memory.stamp().map_err(|error| ImageError::io(&name, "fstat", error))?;
    let length = memory.len_bytes().map_err(|error| ImageError::io(&name, "fstat", error))?;
    if length % PAGE_BYTES as u64 != 0 {
        return Err(ImageError::Request(format!(
            "{name} has {length} bytes, which are no whole pages of memory"
        )));
    }
    let block = Block { name: snapshot.memory.clone(), length_bytes: length, address: None };
    let (writer, base) = writer_at(to, vec![block], options, snapshot.kind)?;
    let part = MemoryPart { file: &memory, name: &name, offset: 0, length_bytes: length };
    let base = base.as_deref().filter(|_| is_diff);
    store_memory(&[part], &writer, base, threads(options.threads), &|_| true)?;
    let mut recipe = Recipe::default();
    recipe.push(Piece::Copy { block: 0, offset: 0, length });
    let mut files = vec![(snapshot.memory.as_str(), recipe)];
    for other in &snapshot.others {
        files.push((other, store_file(&from.join(other), &writer)?));
    }
    crate::read::image::check_unchanged(&memory, stamp, &name)?;
    let bytes = writer.complete(&files)?.bytes;
    Ok(ConvertedDirectory { kind: snapshot.kind.to_owned(), ram_bytes: length, bytes })
}

/// The VMM whose directory the image at `path` contains; none if the image is of QEMU, or has another format.
///
/// # Errors
/// The errors of opening an image in Sterna's own format.
pub fn directory_kind(path: &Path, access: &Access) -> Result<Option<String>, ImageError> {
    let mut magic = [0; 8];
    if let Place::File(path) = Place::parse(path)? {
        let is_there =
            path.is_file() && File::open(&path).is_ok_and(|file| file.read_exact_at(&mut magic, 0).is_ok());
        if !is_there || !StoredImage::is_magic(&magic) {
            return Ok(None);
        }
    }
    let kind = open_stored(path, access)?.kind().to_owned();
    Ok(Some(kind).filter(|kind| kind != QEMU))
}

/// Copies the image at `from`, in Sterna's own format, whatever VMM it is of: to a file or a store, with other options or over
/// another base.
///
/// # Errors
/// The errors of the image; nothing is visible at `to` then.
pub fn copy_image(
    from: &Path,
    to: &Path,
    options: &ConvertOptions,
) -> Result<ConvertedDirectory, ImageError> {
    let stored = open_stored(from, &options.access)?;
    let (writer, _) = writer_at(to, stored.blocks().to_vec(), options, stored.kind())?;
    let bytes = stored.copy(writer, threads(options.threads))?.bytes;
    let ram_bytes = stored.blocks().iter().map(|block| block.length_bytes).sum();
    Ok(ConvertedDirectory { kind: stored.kind().to_owned(), ram_bytes, bytes })
}

/// Writes the files of the image at `from` into a new directory `to`.
///
/// # Errors
/// [`ImageError::Exists`] if `to` exists; the errors of the image. Then there is no directory `to`.
pub fn write_directory(
    from: &Path,
    to: &Path,
    options: &ConvertOptions,
) -> Result<ConvertedDirectory, ImageError> {
    let stored = open_stored(from, &options.access)?;
    if to.symlink_metadata().is_ok() {
        return Err(ImageError::Exists { file: to.display().to_string() });
    }
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let staging = Staging(to.with_file_name(format!(".{name}.{}.sterna-tmp", std::process::id())));
    let shown = to.display().to_string();
    fs::create_dir(&staging.0).map_err(|error| ImageError::io(&shown, "mkdir", error))?;
    let mut bytes = 0;
    for file in stored.files() {
        let is_plain = !file.name.is_empty() && !file.name.starts_with('.') && !file.name.contains('/');
        if !is_plain {
            let text = format!(
                "{} contains a file {:?}, which is no name in a directory",
                from.display(),
                file.name
            );
            return Err(ImageError::Request(text));
        }
        let Some(reader) = stored.file(&file.name)? else { continue };
        let path = staging.0.join(&file.name);
        write_file(
            &path,
            file.length_bytes,
            &|offset, to| Ok(reader.read_at(offset, to)?),
            threads(options.threads),
        )?;
        bytes += file.length_bytes;
    }
    let directory = File::open(&staging.0).and_then(|directory| directory.sync_all());
    directory.map_err(|error| ImageError::io(&shown, "fsync", error))?;
    publish(&staging.0, to, false)?;
    let ram_bytes = stored.blocks().iter().map(|block| block.length_bytes).sum();
    Ok(ConvertedDirectory { kind: stored.kind().to_owned(), ram_bytes, bytes })
}

impl Snapshot {
    fn find(directory: &Path) -> Result<Self, ImageError> {
        let shown = directory.display().to_string();
        let failed = |error| ImageError::io(&shown, "readdir", error);
        let mut files = Vec::new();
        for entry in directory.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let metadata = entry.metadata().map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if metadata.is_file() {
                files.push((name, metadata.len()));
            }
        }
        files.sort();
        let no_snapshot = || {
            let rule = format!(
                "the directory is no snapshot: Cloud Hypervisor's has {RANGES}, config.json and state.json, and Firecracker's \
                 has two files, the memory and the state of the devices"
            );
            Err(ImageError::Unsupported { file: shown.clone(), rule, paragraph: "specs/image.md §6" })
        };
        let (kind, memory) = match files.iter().position(|(name, _)| name == RANGES) {
            Some(at) => (CLOUD_HYPERVISOR, at),
            // Firecracker's files have any names. The memory is the longer one.
            None if files.len() == 2 => (FIRECRACKER, usize::from(files[1].1 > files[0].1)),
            None => return no_snapshot(),
        };
        let (memory, length) = files.remove(memory);
        if length == 0 || length % PAGE_BYTES as u64 != 0 {
            return no_snapshot();
        }
        Ok(Self { kind, memory, others: files.into_iter().map(|(name, _)| name).collect() })
    }
}

fn store_file(path: &Path, writer: &ImageWriter) -> Result<Recipe, ImageError> {
    let name = path.display().to_string();
    let length = path.metadata().map_err(|error| ImageError::io(&name, "stat", error))?.len();
    if length > FILE_MOST {
        return Err(ImageError::TooLarge {
            file: name,
            what: "a file of the snapshot",
            limit_bytes: FILE_MOST,
        });
    }
    let bytes = fs::read(path).map_err(|error| ImageError::io(&name, "read", error))?;
    let mut recipe = Recipe::default();
    push_bytes(writer, &mut recipe, &bytes);
    Ok(recipe)
}

/// Reads bytes of a file of an image; fewer at its end.
type ReadFile<'a> = dyn Fn(u64, &mut [u8]) -> Result<usize, ImageError> + Sync + 'a;

fn write_file(path: &Path, length: u64, read: &ReadFile<'_>, threads: usize) -> Result<(), ImageError> {
    let name = path.display().to_string();
    let io = |call| move |error| (call, error);
    let failed = |(call, error)| ImageError::io(&name, call, error);
    let file = File::create_new(path).map_err(io("open")).map_err(failed)?;
    file.set_len(length).map_err(io("ftruncate")).map_err(failed)?;
    let next = AtomicU64::new(0);
    crew::share(threads, || {
        let mut content = vec![0; UNIT as usize];
        loop {
            let start = next.fetch_add(UNIT, Ordering::Relaxed);
            if start >= length {
                return Ok::<(), ImageError>(());
            }
            let content = &mut content[..UNIT.min(length - start) as usize];
            let count = read(start, content)?;
            // Pages of zeros stay holes.
            for (at, page) in (start..).step_by(PAGE_BYTES).zip(content[..count].chunks(PAGE_BYTES)) {
                if page.iter().any(|byte| *byte != 0) {
                    file.write_all_at(page, at).map_err(io("write")).map_err(failed)?;
                }
            }
        }
    })?;
    file.sync_all().map_err(io("fsync")).map_err(failed)
}

/// A directory that is removed unless it got its name.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::FrameOptions;

    fn options() -> ConvertOptions {
        ConvertOptions { threads: 2, ..ConvertOptions::default() }
    }

    fn assert_same(a: &Path, b: &Path, names: &[&str]) {
        for name in names {
            assert!(fs::read(a.join(name)).unwrap() == fs::read(b.join(name)).unwrap(), "{name}");
        }
        assert_eq!(b.read_dir().unwrap().count(), names.len());
    }

    #[test]
    fn snapshots_of_other_programs_come_back_byte_for_byte() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let memory: Vec<u8> = (0..40 * PAGE_BYTES).map(|at| (at / 5000) as u8).collect();
        for (kind, memory_name, others) in [
            (FIRECRACKER, "mem", vec![("vmstate", vec![9; 13_401])]),
            (
                CLOUD_HYPERVISOR,
                RANGES,
                vec![("config.json", b"{}".to_vec()), ("state.json", vec![b'x'; 70_000])],
            ),
        ] {
            let (from, image, back) =
                (path(kind), path(&format!("{kind}.sterna")), path(&format!("{kind}-back")));
            fs::create_dir(&from).unwrap();
            fs::write(from.join(memory_name), &memory).unwrap();
            others.iter().for_each(|(name, bytes)| fs::write(from.join(name), bytes).unwrap());

            let done = convert_directory(&from, &image, false, &options()).unwrap();
            assert_eq!((done.kind.as_str(), done.ram_bytes), (kind, memory.len() as u64));
            assert_eq!(directory_kind(&image, &Access::default()).unwrap().as_deref(), Some(kind));
            write_directory(&image, &back, &options()).unwrap();

            let names: Vec<&str> =
                [memory_name].into_iter().chain(others.iter().map(|(name, _)| *name)).collect();
            assert_same(&from, &back, &names);
            assert!(matches!(write_directory(&image, &back, &options()), Err(ImageError::Exists { .. })));
        }
    }

    #[test]
    fn diff_snapshot_is_a_layer_whose_holes_are_pages_of_the_base() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut memory = vec![1; 64 * PAGE_BYTES];
        for name in ["full", "diff"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("vmstate"), name).unwrap();
        }
        fs::write(path("full").join("mem"), &memory).unwrap();
        let sparse = File::create(path("diff").join("mem")).unwrap();
        sparse.set_len(memory.len() as u64).unwrap();
        memory[20 * PAGE_BYTES..21 * PAGE_BYTES].fill(7);
        sparse.write_all_at(&memory[20 * PAGE_BYTES..21 * PAGE_BYTES], 20 * PAGE_BYTES as u64).unwrap();
        convert_directory(&path("full"), &path("full.sterna"), false, &options()).unwrap();

        let missing = convert_directory(&path("diff"), &path("x"), true, &options());
        assert!(matches!(missing, Err(ImageError::Request(_))));
        let frames = FrameOptions { base: Some(path("full.sterna")), ..FrameOptions::default() };
        convert_directory(&path("diff"), &path("diff.sterna"), true, &ConvertOptions { frames, ..options() })
            .unwrap();
        write_directory(&path("diff.sterna"), &path("back"), &options()).unwrap();

        assert!(fs::read(path("back").join("mem")).unwrap() == memory);
        assert_eq!(fs::read(path("back").join("vmstate")).unwrap(), b"diff");
        let stored = open_stored(&path("diff.sterna"), &Access::default()).unwrap();
        assert_eq!((stored.layers(), stored.held_pages()), (2, 1));
    }
}
