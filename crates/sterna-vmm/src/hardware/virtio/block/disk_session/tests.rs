//! Tests of a disk's requests and their answers.

use std::path::Path;

use virtio_queue::QueueT;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

use imago::FormatCreateBuilder;

use super::*;
use crate::DiskFormat;
use crate::config::DiskOptions;
use crate::hardware::virtio::block::open;
use crate::hardware::virtio::testing::{BUFFERS, Descriptor, Driver, RAM_BYTES, SIZE};

const DISK_BYTES: u64 = 1 << 20;
const HEADER: u64 = BUFFERS;
const STATUS: u64 = BUFFERS + 0x100;
const DATA: u64 = BUFFERS + 0x1000;

fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 + at) as u8).collect();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

fn disk(path: &Path, is_read_only: bool) -> Disk {
    let mut options = DiskOptions::new(path);
    options.is_read_only = is_read_only;
    open(0, &options, false).unwrap().0
}

/// Lets the disk serve the requests in the queue.
fn serve(disk: &Disk, driver: &mut Driver, has_ring: bool) -> Result<(), Broken> {
    let engine = if has_ring { Engine::new(&disk.image) } else { Engine::without_ring(&disk.image) };
    let mut rings = driver.rings();
    let mut session = DiskSession::new(disk, engine);
    session.kicked(&mut rings, 0)?;
    session.finish(&mut rings)
}

/// Sends one request with this data and returns its status.
fn ask(disk: &Disk, kind: u32, sector: u64, data: (u32, bool)) -> u8 {
    let mut driver = Driver::new();
    ask_of(disk, &mut driver, kind, sector, data)
}

fn ask_of(disk: &Disk, driver: &mut Driver, kind: u32, sector: u64, (length, is_written): (u32, bool)) -> u8 {
    let header = [u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat();
    driver.put(HEADER, &header);
    driver.put(STATUS, &[77]);
    let mut parts = vec![(HEADER, 16, false)];
    if length > 0 {
        parts.push((DATA, length, is_written));
    }
    parts.push((STATUS, 1, true));
    driver.add(&parts);
    serve(disk, driver, true).unwrap();
    let [status] = driver.get(STATUS);
    status
}

#[test]
fn what_was_written_is_read_again_with_and_without_io_uring() {
    for has_ring in [true, false] {
        let (image, mut driver) = (image(), Driver::new());
        let disk = disk(image.path(), false);
        driver.put(HEADER, &[u64::from(VIRTIO_BLK_T_OUT).to_le_bytes(), 3u64.to_le_bytes()].concat());
        driver.put(HEADER + 32, &u64::from(VIRTIO_BLK_T_FLUSH).to_le_bytes());
        driver.put(HEADER + 64, &[u64::from(VIRTIO_BLK_T_IN).to_le_bytes(), 2u64.to_le_bytes()].concat());
        driver.put(DATA, &[9; 512]);
        driver.add(&[(HEADER, 16, false), (DATA, 500, false), (DATA + 500, 12, false), (STATUS, 1, true)]);
        driver.add(&[(HEADER + 32, 16, false), (STATUS + 1, 1, true)]);
        serve(&disk, &mut driver, has_ring).unwrap();
        // The header and the answer may be split into any number of pieces.
        driver.add(&[
            (HEADER + 64, 10, false),
            (HEADER + 74, 6, false),
            (DATA + 4096, 1000, true),
            (DATA + 8192, 25, true),
        ]);
        serve(&disk, &mut driver, has_ring).unwrap();

        assert_eq!(driver.used()[2..], [(6, 1025)], "io_uring: {has_ring}");
        let mut used = driver.used()[..2].to_vec();
        used.sort_unstable();
        assert_eq!(used, [(0, 1), (4, 1)]);
        assert_eq!((driver.get(STATUS), driver.get(DATA + 8192 + 24)), ([0, 0], [0]));
        let on_disk = std::fs::read(image.path()).unwrap();
        assert!(on_disk[3 * 512..4 * 512] == [9; 512] && on_disk[4 * 512] == 4);
        assert!(driver.get::<1000>(DATA + 4096)[..] == on_disk[2 * 512..2 * 512 + 1000]);
        assert!(driver.get::<24>(DATA + 8192)[..] == on_disk[2 * 512 + 1000..4 * 512]);
    }
}

#[test]
fn disk_names_itself_and_makes_holes() {
    let (image, mut driver) = (image(), Driver::new());
    let disk = disk(image.path(), false);
    assert_eq!(ask_of(&disk, &mut driver, VIRTIO_BLK_T_GET_ID, 0, (20, true)), 0);
    assert_eq!(driver.get(DATA), *b"sterna-disk-0\0\0\0\0\0\0\0");
    for (kind, flags, start) in [
        (VIRTIO_BLK_T_DISCARD, 0u32, 8u64),
        (VIRTIO_BLK_T_WRITE_ZEROES, 1, 16),
        (VIRTIO_BLK_T_WRITE_ZEROES, 0, 24),
    ] {
        let piece = [&start.to_le_bytes()[..], &8u32.to_le_bytes(), &flags.to_le_bytes()].concat();
        let mut driver = Driver::new();
        driver.put(DATA, &piece);
        assert_eq!(ask_of(&disk, &mut driver, kind, 0, (16, false)), 0, "{kind} {flags}");
        let on_disk = std::fs::read(image.path()).unwrap();
        let (from, to) = (start as usize * 512, (start as usize + 8) * 512);
        assert!(on_disk[from..to].iter().all(|byte| *byte == 0) && on_disk[to] != 0);
        assert_eq!(on_disk.len() as u64, DISK_BYTES);
    }
}

#[test]
fn request_that_the_disk_cannot_do_has_an_answer() {
    let image = image();
    let (writable, read_only) = (disk(image.path(), false), disk_unlocked(image.path()));
    let last = DISK_BYTES / 512;
    for (kind, sector, data, code) in [
        (VIRTIO_BLK_T_IN, last, (512, true), VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, last - 1, (1024, true), VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, u64::MAX, (512, true), VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, 0, (100, true), VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_OUT, last, (512, false), VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_GET_ID, 0, (19, true), VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_DISCARD, 0, (15, false), VIRTIO_BLK_S_IOERR),
        (99, 0, (512, true), VIRTIO_BLK_S_UNSUPP),
    ] {
        assert_eq!(u32::from(ask(&writable, kind, sector, data)), code, "{kind} {sector} {data:?}");
    }
    assert_eq!(u32::from(ask(&read_only, VIRTIO_BLK_T_OUT, 0, (512, false))), VIRTIO_BLK_S_IOERR);
    assert_eq!(u32::from(ask(&read_only, VIRTIO_BLK_T_IN, 0, (512, true))), VIRTIO_BLK_S_OK);
    assert_eq!(std::fs::read(image.path()).unwrap()[..512].len(), 512);
}

/// A disk without a lock, as a destination opens it.
fn disk_unlocked(path: &Path) -> Disk {
    let mut options = DiskOptions::new(path);
    options.is_read_only = true;
    open(0, &options, true).unwrap().0
}

#[test]
fn queue_that_has_more_than_fits_is_not_forgotten() {
    let image = image();
    let disk = disk(image.path(), true);
    let mut driver = Driver::new();
    driver.queue.set_event_idx(true);
    driver.put(HEADER, &[u64::from(VIRTIO_BLK_T_IN).to_le_bytes(), 2u64.to_le_bytes()].concat());
    for _ in 0..5 {
        driver.add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    }
    let mut rings = driver.rings();
    let mut session = DiskSession::new(&disk, Engine::without_ring(&disk.image).of_depth(2));
    session.kicked(&mut rings, 0).unwrap();
    // The guest can add requests without end, so the machine must be able to stop between two of them.
    assert!(session.has_more());
    while session.has_more() {
        session.woken(&mut rings).unwrap();
    }
    drop((session, rings));

    assert_eq!((driver.used().len(), driver.kicked_after()), (5, 5));
}

#[test]
fn request_without_room_for_its_status_breaks_the_device() {
    let image = image();
    let disk = disk(image.path(), false);
    for (parts, says) in
        [(&[(HEADER, 16, false)][..], "status"), (&[(HEADER, 15, false), (STATUS, 1, true)][..], "header")]
    {
        let mut driver = Driver::new();
        driver.add(parts);
        let why = serve(&disk, &mut driver, true).unwrap_err().to_string();
        assert!(why.contains(says), "{why}");
    }
}

/// For any content of the table, the device fails or continues. It does not change other memory.
#[test]
fn random_tables_do_no_harm() {
    let image = image();
    let disk = disk(image.path(), true);
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut driver = Driver::new();
        driver.put(
            HEADER,
            &[u64::from(random.u32(0..15)).to_le_bytes(), random.u64(0..2100).to_le_bytes()].concat(),
        );
        for index in 0..SIZE {
            let address = match random.u8(0..8) {
                0 => random.u64(..),
                1 => RAM_BYTES - random.u64(0..1000),
                2 => HEADER,
                _ => DATA + random.u64(0..0x10000),
            };
            let length = match random.u8(0..6) {
                0 => random.u32(..),
                1 => 16,
                2 => 1,
                _ => 512 * random.u32(0..9),
            };
            let flags = if random.u8(0..8) == 0 { random.u16(..) } else { random.u16(0..4) };
            let next = random.u16(0..SIZE + 2);
            driver.describe(index, Descriptor { address, length, flags, next });
        }
        (0..random.u16(0..SIZE)).for_each(|_| driver.offer(random.u16(0..SIZE)));
        let guard = [0x5a; 256];
        driver.put(0x8000, &guard);
        let result = serve(&disk, &mut driver, seed % 2 == 0);
        assert!(driver.get(0x8000) == guard, "seed {seed}: {result:?}");
    }
}

/// Compares the disk with a model in memory while two machines use it alternately.
#[test]
fn qcow2_holds_what_was_written_on_whichever_side() {
    let seed = 7;
    let mut random = fastrand::Rng::with_seed(seed);
    let (file, base) = (tempfile::NamedTempFile::new().unwrap(), image());
    let mut options = DiskOptions::new(file.path());
    options.format = DiskFormat::Qcow2;
    options.backing = Some((base.path().to_owned(), DiskFormat::Raw));
    let storage = imago::file::File::try_from(file.reopen().unwrap()).unwrap();
    let builder = imago::qcow2::Qcow2::<imago::file::File>::create_builder(storage).cluster_size(4096);
    builder.backing("named".to_owned(), "raw".to_owned()).size(DISK_BYTES).create().unwrap();
    let mut model = std::fs::read(base.path()).unwrap();
    let [(here, hook), (there, other)] = [false, true].map(|waits| open(0, &options, waits).unwrap());
    let mut sides = [(here, hook.unwrap()), (there, other.unwrap())];
    for _ in 0..4 {
        for step in 0..100 {
            let start = random.u64(0..DISK_BYTES / 512 - 64);
            let sectors = random.u64(1..=64);
            let (from, length) = (start as usize * 512, sectors as usize * 512);
            let mut driver = Driver::new();
            let flags = random.u32(0..2);
            let piece =
                [&start.to_le_bytes()[..], &(sectors as u32).to_le_bytes(), &flags.to_le_bytes()].concat();
            let kind =
                *random.choice(&[VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_WRITE_ZEROES]).unwrap();
            let data = match kind {
                VIRTIO_BLK_T_OUT => {
                    let bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
                    driver.put(DATA, &bytes);
                    model[from..from + length].copy_from_slice(&bytes);
                    (length as u32, false)
                }
                VIRTIO_BLK_T_IN => (length as u32, true),
                _ => {
                    driver.put(DATA, &piece);
                    model[from..from + length].fill(0);
                    (16, false)
                }
            };
            let status = ask_of(&sides[0].0, &mut driver, kind, start, data);
            assert_eq!(status, 0, "seed {seed}, step {step}, kind {kind}");
            if kind == VIRTIO_BLK_T_IN {
                let read: [u8; 64 * 512] = driver.get(DATA);
                assert!(read[..length] == model[from..from + length], "seed {seed}, step {step}");
            }
        }
        assert_eq!(ask(&sides[0].0, VIRTIO_BLK_T_FLUSH, 0, (0, false)), 0);
        assert_ne!(ask(&sides[1].0, VIRTIO_BLK_T_IN, 0, (512, true)), 0, "the other side has not got it");
        sides[0].1.release().unwrap();
        sides[1].1.acquire().unwrap();
        sides.swap(0, 1);
    }
    let mut driver = Driver::new();
    driver.put(DATA, &[&8u64.to_le_bytes()[..], &64u32.to_le_bytes(), &0u32.to_le_bytes()].concat());
    assert_eq!(ask_of(&sides[0].0, &mut driver, VIRTIO_BLK_T_DISCARD, 0, (16, false)), 0);
    model[8 * 512..72 * 512].fill(0);
    let mut content = vec![0; model.len()];
    sides[0].0.image.read_at(&mut content, 0).unwrap();
    assert!(content == model, "seed {seed}");
    assert!(
        std::fs::read(base.path()).unwrap() == std::fs::read(image().path()).unwrap(),
        "it was only read"
    );
}
