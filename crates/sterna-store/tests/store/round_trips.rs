//! Every option gives back the bytes that were written.

use std::os::unix::fs::FileExt;

use sterna_store::{Key, PAGE_BYTES, PagePlace, StoreError, StoredImage, WriteOptions};

use crate::common::{assert_has, ram, write};

#[test]
fn image_of_random_ram_gives_it_back_for_every_extent_level_and_key() {
    let mut rng = sterna_testing::random("image_of_random_ram");
    let directory = tempfile::tempdir().unwrap();
    for number in 0..24 {
        let ram = ram(&mut rng);
        let path = directory.path().join(format!("{number}"));
        let key = rng.bool().then(|| Key::new([7; 32]));
        let (extent_bytes, level) = (1 << rng.u32(16..=21), rng.i32(0..4));
        let options = WriteOptions { extent_bytes, level, key: key.clone(), ..WriteOptions::default() };

        let written = write(&path, &ram, options).unwrap();
        let image = StoredImage::open(&path, key.as_ref()).unwrap();

        assert_eq!(image.digest(), written.digest);
        assert_eq!(written.bytes, path.metadata().unwrap().len());
        assert_has(&image, &ram);
        assert!(image.check(2).unwrap().damage.is_empty());
    }
}

#[test]
fn zero_pages_take_no_room_and_equal_extents_are_one_frame() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(64 << 10).collect();
    let ram = vec![[noise.clone(), vec![0; 1 << 20], noise.clone(), noise].concat(), vec![0; PAGE_BYTES]];

    let written = write(&path, &ram, WriteOptions::default()).unwrap();
    let image = StoredImage::open(&path, None).unwrap();

    // One frame for the noise, and one for the bytes of the file.
    assert_eq!((written.frames, written.held_pages), (2, 17));
    assert!(written.bytes < 70 << 10, "{}", written.bytes);
    assert_eq!(image.place(0, 16), PagePlace::Zero);
    let first = PagePlace::Frame { layer: 0, frame: 0, position: 3 };
    assert_eq!((image.place(0, 3), image.place(0, 16 + 256 + 3)), (first, first));
    assert_has(&image, &ram);
}

#[test]
fn wrong_key_is_refused_at_the_header_and_names_and_digests_are_not_visible() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let (key, other) = (Key::new([1; 32]), Key::new([2; 32]));
    let ram = vec![vec![0x77; 64 << 10], vec![0; PAGE_BYTES]];
    let options = WriteOptions { key: Some(key.clone()), level: 0, ..WriteOptions::default() };
    write(&path, &ram, options).unwrap();
    let bytes = std::fs::read(&path).unwrap();

    assert!(matches!(StoredImage::open(&path, None), Err(StoreError::KeyNeeded { .. })));
    assert!(matches!(StoredImage::open(&path, Some(&other)), Err(StoreError::WrongKey { .. })));
    assert_has(&StoredImage::open(&path, Some(&key)).unwrap(), &ram);
    for secret in [&b"pc.ram"[..], b"the devices", &[0x77; 16], &blake3::hash(&ram[0]).as_bytes()[..8]] {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret));
    }
    write(&directory.path().join("plain"), &ram, WriteOptions::default()).unwrap();
    let plain = StoredImage::open(&directory.path().join("plain"), Some(&key));
    assert!(matches!(plain, Err(StoreError::NotEncrypted { .. })));
}

#[test]
fn existing_image_is_replaced_only_on_request_and_a_failed_write_leaves_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let (old, new) = (vec![vec![1; PAGE_BYTES], vec![2; PAGE_BYTES]], vec![vec![3; PAGE_BYTES]; 2]);
    write(&path, &old, WriteOptions::default()).unwrap();

    let refused = write(&path, &new, WriteOptions::default());
    assert!(matches!(refused, Err(StoreError::Conflict { .. })));
    let replace = || WriteOptions { replace: true, ..WriteOptions::default() };
    assert!(write(&path, &new, WriteOptions { level: 99, ..replace() }).is_err());
    assert_has(&StoredImage::open(&path, None).unwrap(), &old);

    let open = StoredImage::open(&path, None).unwrap();
    write(&path, &new, replace()).unwrap();
    assert_has(&open, &old);
    assert_has(&StoredImage::open(&path, None).unwrap(), &new);
    assert_eq!(directory.path().read_dir().unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn second_content_of_an_extent_replaces_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let block =
        |name: &str| sterna_store::Block { name: name.into(), length_bytes: 128 << 10, address: Some(0) };
    let writer =
        sterna_store::ImageWriter::create(&path, vec![block("a"), block("b")], WriteOptions::default())
            .unwrap();
    let mut lane = writer.lane().unwrap();
    lane.put(0, 1, &[1; 64 << 10]).unwrap();
    let mut content = vec![9; 64 << 10];
    writer.read_extent(0, 1, &mut content).unwrap();
    assert!(content.iter().all(|byte| *byte == 1));
    content[..PAGE_BYTES].fill(0);
    lane.put(0, 1, &content).unwrap();
    drop(lane);
    writer.complete(&[]).unwrap();
    let image = StoredImage::open(&path, None).unwrap();

    let mut read = vec![9; 128 << 10];
    image.read(0, 0, &mut read).unwrap();
    assert!(read[..68 << 10].iter().all(|byte| *byte == 0) && read[68 << 10..].iter().all(|byte| *byte == 1));
    assert_eq!(image.frames(), 1);
}

#[test]
fn image_that_lost_its_end_or_got_more_bytes_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    write(&path, &[vec![5; PAGE_BYTES], vec![6; PAGE_BYTES]], WriteOptions::default()).unwrap();
    let bytes = std::fs::read(&path).unwrap();

    for length in [0, 5, 127, 128, 190, 200, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = StoredImage::open(&path, None).unwrap_err();
        assert!(error.is_image_at_fault(), "{length}: {error}");
    }
    std::fs::write(&path, [&bytes[..], b"\n"].concat()).unwrap();
    assert!(matches!(StoredImage::open(&path, None), Err(StoreError::Broken { part: "the footer", .. })));

    std::fs::write(&path, &bytes).unwrap();
    let image = StoredImage::open(&path, None).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"other", 130).unwrap();
    let error = image.read(0, 0, &mut [0; PAGE_BYTES]).unwrap_err();
    let StoreError::Frame { frame: 0, pages, .. } = &error else { panic!("{error}") };
    assert!(pages.contains("pc.ram, pages 0x0 to 0x0"), "{error}");
}
