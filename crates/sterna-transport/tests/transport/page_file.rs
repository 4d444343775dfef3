//! Page files: complete or absent, direct I/O, holes, and a disk without space.

use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna_transport::{
    CreateOptions, Direct, IoPart, OpenOptions, PageFile, PageQueue, QueueOptions, RangeReader,
    TransportError,
};

const PAGE: u64 = PAGE_SIZE as u64;
const MIB: u64 = 1 << 20;

fn ram(name: &str, pages: u64, backing: Backing) -> GuestRam {
    GuestRam::new(vec![RamBlock::new(name, pages * PAGE, backing).unwrap()]).unwrap()
}

/// Writes into each page its number, at an offset that depends on the number.
fn number(ram: &GuestRam) {
    for page in 0..ram.block(0).pages() {
        ram.block(0).write_u64(page * PAGE + page % 512 * 8, page + 1).unwrap();
    }
}

fn assert_numbered(ram: &GuestRam) {
    for page in 0..ram.block(0).pages() {
        assert_eq!(ram.block(0).read_u64(page * PAGE + page % 512 * 8).unwrap(), page + 1, "page {page}");
    }
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A directory on a disk (the build's), where direct I/O usually works.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// All modes of a queue: with and without direct I/O, io_uring and registered RAM.
fn ways() -> [(Direct, QueueOptions); 5] {
    let options = QueueOptions::default();
    [
        (Direct::Wanted, options),
        (Direct::Wanted, QueueOptions { register_ram: true, ..options }),
        (Direct::Wanted, QueueOptions { depth: 1, ..options }),
        (Direct::Wanted, QueueOptions { io_uring: false, ..options }),
        (Direct::Off, options),
    ]
}

#[test]
fn queue_ram_goes_out_and_comes_back_every_way() {
    const PAGES: u64 = 3000;
    for backing in [Backing::Memfd, Backing::Anonymous] {
        for (direct, options) in ways() {
            let directory = on_disk();
            let path = directory.path().join("image");
            let from = ram("from", PAGES, backing);
            number(&from);

            let file = PageFile::create(&path, CreateOptions { direct, ..Default::default() }).unwrap();
            let file = Arc::new(file);
            file.write_at(3, &[IoPart::Bytes(b"head")]).unwrap();
            let mut queue = PageQueue::with_ram(&file, &from, options);
            for first in (0..PAGES).step_by(700) {
                let count = 700.min(PAGES - first);
                queue.write_ram(MIB + first * PAGE, 0, first * PAGE, (count * PAGE) as usize).unwrap();
            }
            queue.drain().unwrap();
            assert_eq!(queue.moved_bytes(), PAGES * PAGE);
            drop(queue);
            file.write_at(MIB + PAGES * PAGE, &[IoPart::Bytes(b"tail")]).unwrap();
            assert!(!path.exists(), "not in its place before it is complete");
            file.complete().unwrap();
            assert_eq!(names(directory.path()), ["image"]);

            let file = Arc::new(PageFile::open(&path, OpenOptions { direct }).unwrap());
            let to = ram("to", PAGES, backing);
            let mut queue = PageQueue::with_ram(&file, &to, options);
            for first in (0..PAGES).step_by(311) {
                let count = 311.min(PAGES - first);
                queue.read_ram(MIB + first * PAGE, 0, first * PAGE, (count * PAGE) as usize).unwrap();
            }
            queue.drain().unwrap();
            assert_numbered(&to);
            let mut bytes = [0; 4];
            file.read_bytes_at(3, &mut bytes).unwrap();
            assert_eq!(&bytes, b"head");
            file.read_bytes_at(MIB + PAGES * PAGE, &mut bytes).unwrap();
            assert_eq!(&bytes, b"tail");
        }
    }
}

#[test]
fn queue_bytes_at_odd_places_are_put_together() {
    for (direct, options) in ways() {
        let directory = on_disk();
        let path = directory.path().join("stream");
        let all: Vec<u8> = (0..5_000_011u32).map(|at| (at / 7 % 251) as u8).collect();
        let file = Arc::new(PageFile::create(&path, CreateOptions { direct, ..Default::default() }).unwrap());
        let mut queue = PageQueue::new(&file, options);
        let mut at = 0;
        for length in [1, 8, 4096, 4104, 1_048_576, 3_000_000, 900_000, 17].into_iter().cycle() {
            let end = all.len().min(at + length);
            queue.write_bytes(at as u64, &all[at..end]).unwrap();
            at = end;
            if at == all.len() {
                break;
            }
        }
        queue.write_bytes(6_000_000, b"behind a hole").unwrap();
        queue.drain().unwrap();
        file.complete().unwrap();

        let read = std::fs::read(&path).unwrap();
        assert_eq!(read.len(), 6_000_013);
        assert!(read[..all.len()] == all, "{direct:?} {options:?}");
        assert!(read[all.len()..6_000_000].iter().all(|byte| *byte == 0));
        assert_eq!(&read[6_000_000..], b"behind a hole");
    }
}

#[test]
fn queue_file_that_ends_too_early_says_where() {
    for (direct, options) in ways() {
        let directory = on_disk();
        let path = directory.path().join("image");
        std::fs::write(&path, vec![1; 5000]).unwrap();
        let file = Arc::new(PageFile::open(&path, OpenOptions { direct }).unwrap());
        let to = ram("to", 8, Backing::Memfd);
        let mut queue = PageQueue::with_ram(&file, &to, options);
        let result = queue.read_ram(0, 0, 0, 8 * PAGE_SIZE).and_then(|()| queue.drain());
        match result {
            Err(TransportError::FileEnd { offset: 5000, missing, .. }) => {
                assert_eq!(missing, 8 * PAGE - 5000)
            }
            result => panic!("{direct:?} {options:?}: {result:?}"),
        }
    }
}

#[test]
fn queue_that_has_failed_fails_from_then_on() {
    for (direct, options) in ways() {
        let directory = on_disk();
        let path = directory.path().join("image");
        std::fs::write(&path, vec![1; 5000]).unwrap();
        // The file is opened read-only, so writes must fail.
        let file = Arc::new(PageFile::open(&path, OpenOptions { direct }).unwrap());
        let mut queue = PageQueue::new(&file, options);

        let written = queue.write_bytes(0, &vec![7; 3 * MIB as usize + 5]).and_then(|()| queue.drain());

        assert!(matches!(written, Err(TransportError::System { .. })), "{written:?}");
        for _ in 0..2 {
            assert!(queue.write_bytes(0, b"more").is_err(), "{direct:?} {options:?}");
            assert!(queue.drain().is_err(), "{direct:?} {options:?}");
        }
        assert_eq!(queue.moved_bytes(), 0);
    }
}

#[test]
fn create_where_a_file_lies_is_refused_unless_it_may_be_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, "old and long").unwrap();
    let refused = PageFile::create(&path, CreateOptions::default());
    assert!(matches!(refused, Err(TransportError::FileExists { .. })), "{refused:?}");

    let options = CreateOptions { replace: true, keep_bytes: 3, ..Default::default() };
    let file = PageFile::create(&path, options).unwrap();
    file.write_at(4, &[IoPart::Bytes(b"new")]).unwrap();
    drop(file);
    assert_eq!(std::fs::read(&path).unwrap(), b"old and long", "dropped, it never was");
    assert_eq!(names(directory.path()), ["image"]);

    let file = PageFile::create(&path, options).unwrap();
    file.write_at(4, &[IoPart::Bytes(b"new")]).unwrap();
    file.complete().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"old\0new");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn complete_where_a_file_has_come_meanwhile_leaves_that_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let file = PageFile::create(&path, CreateOptions::default()).unwrap();
    file.write_at(0, &[IoPart::Bytes(b"ours")]).unwrap();
    std::fs::write(&path, "theirs").unwrap();

    let refused = file.complete();

    assert!(matches!(refused, Err(TransportError::FileExists { .. })), "{refused:?}");
    drop(file);
    assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
    assert_eq!(names(directory.path()), ["image"]);
}

#[test]
fn create_behind_a_link_puts_the_file_where_the_link_leads() {
    let directory = tempfile::tempdir().unwrap();
    let (link, path) = (directory.path().join("link"), directory.path().join("image"));
    std::fs::write(&path, "old").unwrap();
    symlink(&path, &link).unwrap();
    let file = PageFile::create(&link, CreateOptions { replace: true, ..Default::default() }).unwrap();
    file.write_at(0, &[IoPart::Bytes(b"new")]).unwrap();
    file.complete().unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

#[test]
fn create_over_what_is_no_file_is_refused_always() {
    let directory = tempfile::tempdir().unwrap();
    let options = CreateOptions { replace: true, ..Default::default() };
    for path in [Path::new("/dev/null"), directory.path(), Path::new("/")] {
        let refused = PageFile::create(path, options);
        assert!(matches!(refused, Err(TransportError::NotAFile { .. })), "{path:?}: {refused:?}");
    }
    let refused = PageFile::create("/nonexistent/image", options);
    assert!(matches!(refused, Err(TransportError::System { .. })), "{refused:?}");
    let refused = PageFile::open("/dev/null", OpenOptions::default());
    assert!(matches!(refused, Err(TransportError::NotAFile { .. })), "{refused:?}");
}

#[test]
fn stale_staging_files_names_those_that_nobody_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let alive = PageFile::create(&path, CreateOptions::default()).unwrap();
    // In a container, the killed process and the next one both have id 1.
    let dead = directory.path().join(".image.1-0.partial");
    std::fs::write(&dead, "left").unwrap();
    std::fs::write(directory.path().join(".image.other.1-0.partial"), "another's").unwrap();

    assert_eq!(PageFile::stale_staging_files(&path), [dead]);
    drop(alive);
}

#[test]
fn keep_gives_the_file_a_name_that_is_no_rubbish() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let file = PageFile::create(&path, CreateOptions::default()).unwrap();
    file.write_at(0, &[IoPart::Bytes(b"the only copy")]).unwrap();
    file.sync().unwrap();
    // A directory is never replaced, so publishing fails.
    std::fs::create_dir(&path).unwrap();
    file.publish().unwrap_err();

    let kept = file.keep();
    drop(file);

    assert_eq!(std::fs::read(&kept).unwrap(), b"the only copy");
    assert!(kept.to_string_lossy().ends_with(".kept"), "{kept:?}");
    assert!(PageFile::stale_staging_files(&path).is_empty());
}

#[test]
fn temporary_file_has_no_name_and_is_read_again() {
    for (direct, _) in ways() {
        let directory = on_disk();
        let file = PageFile::temporary(directory.path(), direct).unwrap();
        file.write_at(0, &[IoPart::Bytes(&[7; 8192])]).unwrap();

        assert_eq!(names(directory.path()), [] as [&str; 0]);

        let again = file.reopened().unwrap();
        drop(file);
        assert_eq!(again.metadata().unwrap().len(), 8192);
    }
}

#[test]
fn create_with_the_longest_name_finds_room_for_the_staging_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ä".repeat(127));
    let file = PageFile::create(&path, CreateOptions::default()).unwrap();
    file.complete().unwrap();
    assert!(path.exists());
}

#[test]
fn punch_gives_the_room_back_and_reads_as_zero() {
    let directory = on_disk();
    let path = directory.path().join("image");
    let file = PageFile::create(&path, CreateOptions::default()).unwrap();
    file.write_at(0, &[IoPart::Bytes(&vec![7; 4 * MIB as usize])]).unwrap();
    file.sync().unwrap();
    let before = file.allocated_bytes().unwrap();
    file.punch(MIB..3 * MIB).unwrap();
    file.punch(5 * MIB..5 * MIB).unwrap();

    assert_eq!(file.len_bytes().unwrap(), 4 * MIB);
    let mut bytes = vec![1; MIB as usize];
    file.read_bytes_at(2 * MIB - MIB / 2, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    if file.allocated_bytes().unwrap() < before {
        assert_eq!(file.next_data(MIB, 4 * MIB).unwrap(), Some(3 * MIB..4 * MIB));
        assert_eq!(file.next_data(0, 2 * MIB).unwrap(), Some(0..MIB));
        assert_eq!(file.next_data(MIB, 2 * MIB).unwrap(), None);
    }
    assert_eq!(file.next_data(4 * MIB, 4 * MIB).unwrap(), None);
}

#[test]
fn copy_and_reflink_bring_the_bytes() {
    let directory = on_disk();
    let bytes: Vec<u8> = (0..3 * MIB).map(|at| (at / 11 % 253) as u8).collect();
    let from = directory.path().join("from");
    std::fs::write(&from, &bytes).unwrap();
    let from = PageFile::open(&from, OpenOptions::default()).unwrap();
    let file = PageFile::create(directory.path().join("to"), CreateOptions::default()).unwrap();

    assert!(!file.reflink_range(1, &from, 0, MIB).unwrap(), "no file system shares odd bytes");
    if !file.reflink_range(0, &from, MIB, MIB).unwrap() {
        assert_eq!(file.copy_range(0, &from, MIB, MIB).unwrap(), MIB);
    }
    assert_eq!(file.copy_range(MIB, &from, 3 * MIB - 5, MIB).unwrap(), 5);

    let mut read = vec![0; MIB as usize + 5];
    file.read_bytes_at(0, &mut read).unwrap();
    assert!(read[..MIB as usize] == bytes[MIB as usize..2 * MIB as usize]);
    assert!(read[MIB as usize..] == bytes[3 * MIB as usize - 5..]);
}

#[test]
fn create_with_direct_required_is_refused_where_it_cannot_be_had() {
    // Files in /proc and /sys do not support direct I/O, and exist on every host.
    let path = PathBuf::from("/proc/self/status");
    let refused = PageFile::open(&path, OpenOptions { direct: Direct::Required });
    assert!(matches!(refused, Err(TransportError::NoDirect { .. })), "{refused:?}");
    let file = PageFile::open(&path, OpenOptions { direct: Direct::Wanted }).unwrap();
    assert!(!file.is_direct());
}

#[test]
fn reader_ranges_come_in_order_every_way() {
    let directory = on_disk();
    let path = directory.path().join("image");
    let all: Vec<u8> = (0..9_000_003u32).map(|at| (at / 5 % 241) as u8).collect();
    std::fs::write(&path, &all).unwrap();
    // Adjacent, near and distant ranges, one larger than several buffers, an empty one, and the unaligned end of
    // the file.
    let ranges = [
        0..1,
        1..4096,
        5000..5001,
        70_000..70_007,
        200_000..200_000,
        1_048_570..1_048_580,
        1_500_001..8_000_009,
        8_900_000..9_000_003,
    ];
    for (direct, options) in ways() {
        let file = Arc::new(PageFile::open(&path, OpenOptions { direct }).unwrap());
        let mut reader = RangeReader::new(&file, options);
        for _ in 0..2 {
            let mut got: Vec<(u64, usize)> = Vec::new();
            reader
                .read(ranges.clone(), |at, bytes| {
                    assert!(bytes == &all[at as usize..at as usize + bytes.len()], "at {at}");
                    got.push((at, bytes.len()));
                    Ok::<(), TransportError>(())
                })
                .unwrap();
            let mut wanted = ranges.iter().filter(|range| !range.is_empty());
            let mut range = wanted.next().unwrap().clone();
            for (at, length) in got {
                assert_eq!(at, range.start);
                range.start += length as u64;
                if range.is_empty() {
                    range = wanted.next().cloned().unwrap_or(0..0);
                }
            }
            assert!(wanted.next().is_none() && range.is_empty());
        }
        let stopped = reader.read(std::iter::once(0..9_000_003), |at, _| {
            if at > 2_000_000 { Err(TransportError::Cancelled { channel: "here".into() }) } else { Ok(()) }
        });
        assert!(matches!(stopped, Err(TransportError::Cancelled { .. })));
        let short = reader.read(std::iter::once(8_999_000..9_000_004), |_, _| Ok(()));
        assert!(
            matches!(short, Err(TransportError::FileEnd { offset: 9_000_003, missing: 1, .. })),
            "{short:?}"
        );
    }
}

#[test]
fn version_tells_bytes_that_were_written_in_place_under_old_times() {
    let directory = on_disk();
    let path = directory.path().join("image");
    std::fs::write(&path, [7; 8192]).unwrap();
    let file = PageFile::open(&path, OpenOptions { direct: Direct::Wanted }).unwrap();
    let before = file.version().unwrap();
    let target = ram("ram", 2, Backing::Memfd);
    file.read_at(0, &[target.block(0).slice(0, 8192).unwrap()]).unwrap();
    file.read_bytes_at(1, &mut [0; 5000]).unwrap();
    assert_eq!(file.version().unwrap(), before, "reading is no change");
    let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let modified = other.metadata().unwrap().modified().unwrap();
    let began = Instant::now();

    // The clock of inodes has a coarse resolution, so one write may not change the time.
    while file.version().unwrap() == before {
        assert!(began.elapsed() < Duration::from_secs(30), "nobody notices");
        other.write_all_at(&[8], 100).unwrap();
        other.set_times(std::fs::FileTimes::new().set_modified(modified)).unwrap();
    }

    assert_eq!(other.metadata().unwrap().modified().unwrap(), modified);
}
