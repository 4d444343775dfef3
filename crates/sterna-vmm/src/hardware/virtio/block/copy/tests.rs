//! Tests of a disk that is copied with its guest.

use std::os::unix::fs::FileExt;
use std::path::Path;

use sterna_disk::ImageOptions;

use super::*;

const LENGTH: u64 = 40 * BLOCK + 512;

fn copy_of(path: &Path) -> (DiskCopy, Arc<Changes>) {
    let image = Arc::new(Image::open(&ImageOptions::new(path)).unwrap());
    let changes = Arc::new(Changes::new().unwrap());
    (DiskCopy::new(0, image, Arc::clone(&changes)), changes)
}

fn file(length: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(length).unwrap();
    file
}

/// Moves the available bytes in pieces of random length and returns their number.
fn pump(random: &mut fastrand::Rng, from: &DiskCopy, to: &DiskCopy) -> usize {
    let (mut bytes, mut all) = (vec![0; 100_000], 0);
    loop {
        let most = random.usize(1..bytes.len());
        match from.read(&mut bytes[..most]).unwrap() {
            0 => return all,
            length => {
                let cut = random.usize(0..=length);
                to.write(&bytes[..cut]).unwrap();
                to.write(&bytes[cut..length]).unwrap();
                all += length;
            }
        }
    }
}

#[test]
fn disk_that_changes_arrives_as_it_is_at_last_and_sparse() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (source, target) = (file(LENGTH), file(LENGTH));
        let fill = |random: &mut fastrand::Rng, changes: Option<&Changes>| {
            let length = random.u64(1..3 * BLOCK);
            let start = random.u64(0..LENGTH - length);
            let value = random.u8(0..3);
            source.as_file().write_all_at(&vec![value; length as usize], start).unwrap();
            changes.inspect(|changes| changes.written(start, length));
        };
        (0..5).for_each(|_| fill(&mut random, None));
        // The target's earlier content must be lost.
        target.as_file().write_all_at(&[9; 3000], random.u64(0..LENGTH - 3000)).unwrap();
        let ((from, changes), (to, _)) = (copy_of(source.path()), copy_of(target.path()));
        from.begin_save().unwrap();
        to.begin_load().unwrap();
        for _ in 0..4 {
            pump(&mut random, &from, &to);
            (0..random.u8(0..4)).for_each(|_| fill(&mut random, Some(&changes)));
        }
        from.stop().unwrap();
        pump(&mut random, &from, &to);
        assert_eq!(from.remaining().unwrap().total_bytes(), 0);
        to.finish_load(&[]).unwrap();
        from.end_save().unwrap();

        let [left, arrived] = [&source, &target].map(|file| std::fs::read(file.path()).unwrap());
        assert!(left == arrived, "seed {seed}");
    }
}

#[test]
fn holes_are_neither_sent_nor_made() {
    let (source, target) = (file(LENGTH), file(LENGTH));
    source.as_file().write_all_at(&[1; 512], 7 * BLOCK).unwrap();
    let ((from, _), (to, _)) = (copy_of(source.path()), copy_of(target.path()));
    from.begin_save().unwrap();
    to.begin_load().unwrap();
    let sent = pump(&mut fastrand::Rng::with_seed(1), &from, &to);
    to.finish_load(&[]).unwrap();

    assert!(sent <= (BLOCK as usize + HEADER_BYTES) * 2, "{sent} bytes");
    let blocks = std::os::unix::fs::MetadataExt::blocks(&target.as_file().metadata().unwrap());
    assert!(blocks * 512 <= 2 * BLOCK, "{blocks} blocks");
}

#[test]
fn record_that_lies_is_refused() {
    let target = file(LENGTH);
    let record = |start: u64, length: u32, kind: u32| {
        [&start.to_le_bytes()[..], &length.to_le_bytes(), &kind.to_le_bytes()].concat()
    };
    for bytes in [
        record(1, 512, ZERO),
        record(0, 0, ZERO),
        record(0, BLOCK as u32 + 1, DATA),
        record(40 * BLOCK, BLOCK as u32, ZERO),
        record(u64::MAX - BLOCK + 1, BLOCK as u32, ZERO),
        record(0, 512, 2),
    ] {
        let (to, _) = copy_of(target.path());
        to.begin_load().unwrap();
        let why = to.write(&bytes).unwrap_err().to_string();
        assert!(why.contains("disk 0") && why.contains("not valid for this disk"), "{why}");
    }
    let (to, _) = copy_of(target.path());
    to.begin_load().unwrap();
    to.write(&record(0, 512, DATA)).unwrap();
    assert!(to.finish_load(&[]).unwrap_err().to_string().contains("16 bytes of a record"));
}

#[test]
fn epoch_is_checked_before_it_is_held_and_may_be_written_again_after_an_error() {
    let (source, target) = (file(LENGTH), file(LENGTH));
    source.as_file().write_all_at(&[1; 4096], 3 * BLOCK).unwrap();
    let ((from, changes), (to, _)) = (copy_of(source.path()), copy_of(target.path()));
    from.begin_save().unwrap();
    to.begin_load().unwrap();
    pump(&mut fastrand::Rng::with_seed(1), &from, &to);
    for start in [0, 7 * BLOCK, LENGTH - 512] {
        source.as_file().write_all_at(&[2; 512], start).unwrap();
        changes.written(start, 512);
    }
    source.as_file().write_all_at(&[0; 4096], 3 * BLOCK).unwrap();
    changes.written(3 * BLOCK, 4096);
    let mut epoch = vec![0; 1 << 20];
    let length = from.read(&mut epoch).unwrap();
    epoch.truncate(length);
    let before = std::fs::read(target.path()).unwrap();

    to.check_epoch(&epoch).unwrap();
    for cut in [1, HEADER_BYTES, HEADER_BYTES + 1, length - 1] {
        assert!(to.check_epoch(&epoch[..cut]).is_err(), "{cut} of {length} bytes");
    }
    let mut wrong = epoch.clone();
    wrong[7] = 1;
    assert!(to.check_epoch(&wrong).unwrap_err().to_string().contains("not valid for this disk"));
    assert!(std::fs::read(target.path()).unwrap() == before, "nothing is written before it is held");

    // First an epoch that breaks off with an invalid header, then the complete epoch.
    let lies = [&epoch[..HEADER_BYTES + BLOCK as usize], &[0xff; HEADER_BYTES][..]].concat();
    assert!(to.write(&lies).is_err());
    to.write(&epoch).unwrap();
    to.finish_load(&[]).unwrap();
    let [left, arrived] = [&source, &target].map(|file| std::fs::read(file.path()).unwrap());
    assert!(left == arrived);
}
