use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::hardware::virtio::testing::{BUFFERS, Descriptor, Driver, INDIRECT, NEXT, RAM_BYTES, SIZE, WRITE};

#[test]
fn chain_is_taken_and_returned_and_the_driver_is_told() {
    let mut driver = Driver::new();
    driver.put(BUFFERS, b"question");
    let head = driver.add(&[(BUFFERS, 8, false), (BUFFERS + 100, 4, true), (BUFFERS + 200, 10, true)]);
    let mut rings = driver.rings();
    let chain = rings[0].pop().unwrap().unwrap();
    let mut question = [0; 20];
    assert_eq!((chain.readable.read(&mut question), &question[..8]), (8, &b"question"[..]));
    assert_eq!(chain.writable.write(b"an answer"), 9);
    rings[0].push(chain.head, 9).unwrap();
    rings[0].notify().unwrap();
    assert!(rings[0].pop().unwrap().is_none());
    drop(rings);

    assert_eq!(driver.used(), [(head, 9)]);
    assert_eq!((driver.get(BUFFERS + 100), driver.get(BUFFERS + 200)), (*b"an a", *b"nswer"));
    assert_eq!(driver.interrupt.causes(), 1);
}

#[test]
fn what_a_device_writes_is_found() {
    let mut driver = Driver::new();
    driver.add(&[(BUFFERS + 0x5000, 4, true)]);
    let is_dirty = |driver: &Driver, at: u64| {
        let region = driver.memory.find_region(GuestAddress(0)).unwrap();
        region.bitmap().dirty_at(at as usize)
    };
    assert!(!is_dirty(&driver, BUFFERS + 0x5000));
    let mut rings = driver.rings();
    let chain = rings[0].pop().unwrap().unwrap();
    chain.writable.were_written();
    drop((chain, rings));

    assert!(is_dirty(&driver, BUFFERS + 0x5000) && !is_dirty(&driver, BUFFERS + 0x6000));
}

#[test]
fn chain_that_breaks_a_rule_is_refused() {
    let buffer = Descriptor { address: BUFFERS, length: 8, flags: 0, next: 0 };
    let cases: [(&str, &[Descriptor]); 8] = [
        ("does not end", &[Descriptor { flags: NEXT, ..buffer }]),
        ("leaves its table", &[Descriptor { flags: NEXT, next: SIZE, ..buffer }]),
        ("not in RAM", &[Descriptor { address: RAM_BYTES - 4, ..buffer }]),
        ("not in RAM", &[Descriptor { address: u64::MAX - 4, ..buffer }]),
        ("not in RAM", &[Descriptor { length: u32::MAX, ..buffer }]),
        ("follows a buffer", &[Descriptor { flags: WRITE | NEXT, next: 1, ..buffer }, buffer]),
        // A table within a table, and a table whose length is no multiple of a descriptor.
        ("does not end", &[Descriptor { flags: INDIRECT, length: 8, ..buffer }]),
        ("does not end", &[Descriptor { flags: INDIRECT | NEXT, address: RAM_BYTES, length: 16, next: 1 }]),
    ];
    for (says, table) in cases {
        let mut driver = Driver::new();
        (0..).zip(table).for_each(|(index, descriptor)| driver.describe(index, *descriptor));
        driver.offer(0);
        let why = driver.refusal();
        assert!(why.contains(says), "{table:?}: {why}");
    }
    // A table with more pieces than any system call accepts.
    let mut driver = Driver::new();
    for piece in 0..2000u64 {
        let words = [&BUFFERS.to_le_bytes()[..], &1u32.to_le_bytes(), &NEXT.to_le_bytes()].concat();
        driver.put(BUFFERS + 0x1000 + 16 * piece, &words);
        driver.put(BUFFERS + 0x1000 + 16 * piece + 14, &(piece as u16 + 1).to_le_bytes());
    }
    let table = Descriptor { address: BUFFERS + 0x1000, length: 16 * 2000, flags: INDIRECT, next: 0 };
    driver.describe(0, table);
    driver.offer(0);
    assert!(driver.refusal().contains("more than 1024 pieces"));
    let mut driver = Driver::new();
    driver.offer(SIZE);
    assert!(driver.refusal().contains("does not end"));
    // More chains than the ring has entries.
    let mut driver = Driver::new();
    (0..=SIZE).for_each(|_| driver.offer(0));
    assert!(driver.refusal().contains("queue 0"));
}
