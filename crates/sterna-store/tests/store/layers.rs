//! Layers: pages of a base, chains, and bases that are missing or wrong.

use std::path::Path;
use std::sync::Arc;

use sterna_store::{ImageWriter, PAGE_BYTES, StoreError, StoredImage, WriteOptions};

use crate::common::{assert_has, page, ram, write};

fn layer(path: &Path, ram: &[Vec<u8>], base: &Path) -> sterna_store::Written {
    let base = Some(StoredImage::open(base, None).unwrap());
    write(path, ram, WriteOptions { base, ..WriteOptions::default() }).unwrap()
}

#[test]
fn chain_of_64_layers_gives_the_last_ram_and_one_more_is_refused() {
    let mut rng = sterna_testing::random("chain_of_64");
    let directory = tempfile::tempdir().unwrap();
    let place = |number: usize| directory.path().join(format!("{number}"));
    let mut now = ram(&mut rng);
    write(&place(0), &now, WriteOptions::default()).unwrap();
    for number in 1..65 {
        for _ in 0..3 {
            let block = rng.usize(0..2);
            let at = rng.usize(0..now[block].len() / PAGE_BYTES) * PAGE_BYTES;
            now[block][at..at + PAGE_BYTES].copy_from_slice(&page(&mut rng));
        }
        let written = layer(&place(number), &now, &place(number - 1));
        assert!(written.held_pages <= 3 + 1, "{}", written.held_pages);
        if number < 64 {
            assert_has(&StoredImage::open(&place(number), None).unwrap(), &now);
        }
    }

    assert_eq!(StoredImage::open(&place(63), None).unwrap().layers(), 64);
    let refused = StoredImage::open(&place(64), None);
    assert!(matches!(refused, Err(StoreError::ChainTooLong { limit: 64, .. })), "{refused:?}");
}

#[test]
fn missing_wrong_and_other_base_are_refused_with_their_digests() {
    let directory = tempfile::tempdir().unwrap();
    let (base, top) = (directory.path().join("base"), directory.path().join("top"));
    let ram = vec![vec![1; 3 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    let written = write(&base, &ram, WriteOptions::default()).unwrap();
    let mut changed = ram.clone();
    changed[0][..PAGE_BYTES].fill(0);
    layer(&top, &changed, &base);

    std::fs::remove_file(&base).unwrap();
    let missing = StoredImage::open(&top, None).unwrap_err();
    assert!(
        matches!(&missing, StoreError::BaseMissing { digest, hint, .. } if *digest == written.digest && hint == "base")
    );

    let other = write(&base, &changed, WriteOptions::default()).unwrap();
    match StoredImage::open(&top, None).unwrap_err() {
        StoreError::BaseWrong { digest, found, .. } => {
            assert_eq!((digest, found), (written.digest, other.digest))
        }
        error => panic!("{error}"),
    }

    let short = vec![vec![1; PAGE_BYTES], vec![2; PAGE_BYTES]];
    let base = Some(StoredImage::open(&base, None).unwrap());
    let unlike = write(&directory.path().join("x"), &short, WriteOptions { base, ..WriteOptions::default() });
    assert!(matches!(unlike, Err(StoreError::BaseUnlike { .. })), "{unlike:?}");
}

#[test]
fn page_that_became_zero_hides_the_page_of_the_base() {
    let directory = tempfile::tempdir().unwrap();
    let (base, top) = (directory.path().join("base"), directory.path().join("top"));
    let old = vec![vec![1; 40 * PAGE_BYTES], vec![2; PAGE_BYTES]];
    let mut new = old.clone();
    new[0][5 * PAGE_BYTES..6 * PAGE_BYTES].fill(0);
    write(&base, &old, WriteOptions::default()).unwrap();

    let written = layer(&top, &new, &base);
    let image: Arc<StoredImage> = StoredImage::open(&top, None).unwrap();

    assert_has(&image, &new);
    assert_eq!((image.held_pages(), image.layers()), (0, 2));
    assert_eq!(written.held_pages, 1, "the bytes of the file");
}

/// A layer of changes alone never reads its base: the content of pages that did not change is not given.
#[test]
fn layer_of_changes_has_these_pages_and_all_others_of_its_base() {
    let mut rng = sterna_testing::random("layer_of_changes");
    let directory = tempfile::tempdir().unwrap();
    let place = |number: usize| directory.path().join(format!("{number}"));
    let mut now = ram(&mut rng);
    write(&place(0), &now, WriteOptions::default()).unwrap();
    for number in 1..8 {
        let base = StoredImage::open(&place(number - 1), None).unwrap();
        let options = WriteOptions { base: Some(Arc::clone(&base)), ..WriteOptions::default() };
        let writer = ImageWriter::create(&place(number), base.blocks().to_vec(), options).unwrap();
        let mut lane = writer.lane().unwrap();
        let (block, extent_bytes) = (rng.usize(0..2), writer.extent_bytes() as usize);
        let extent = rng.usize(0..now[block].len().div_ceil(extent_bytes));
        let pages = now[block].len().min((extent + 1) * extent_bytes) / PAGE_BYTES
            - extent * extent_bytes / PAGE_BYTES;
        let (mut content, mut changed) = (vec![0xee; pages * PAGE_BYTES], vec![0; pages.div_ceil(8)]);
        let chosen: Vec<_> = (0..pages).filter(|_| rng.bool()).collect();
        for at in chosen {
            let page = if rng.bool() { vec![0; PAGE_BYTES] } else { page(&mut rng) };
            content[at * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&page);
            now[block][extent * extent_bytes + at * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&page);
            changed[at / 8] |= 1 << (at % 8);
        }
        lane.put_changes(block, extent as u64, &content, &changed).unwrap();
        drop(lane);
        writer.complete(&[]).unwrap();

        let image = StoredImage::open(&place(number), None).unwrap();
        for (block, ram) in now.iter().enumerate() {
            let mut read = vec![1; ram.len()];
            image.read(block, 0, &mut read).unwrap();
            assert!(read == *ram, "block {block} differs");
            let words = image.held_words(block);
            for (at, page) in ram.chunks(PAGE_BYTES).enumerate() {
                let is_held = words[at / 64] >> (at % 64) & 1 == 1;
                assert_eq!(is_held, page.iter().any(|byte| *byte != 0), "page {at}");
            }
        }
    }
    let blocks = StoredImage::open(&place(0), None).unwrap().blocks().to_vec();
    let whole = ImageWriter::create(&place(9), blocks, WriteOptions::default()).unwrap();
    let refused = whole.lane().unwrap().put_changes(0, 0, &now[0][..PAGE_BYTES], &[1]);
    assert!(matches!(refused, Err(StoreError::Request(_))), "{refused:?}");
}
