//! The preempt channel: its hello, and its records.

use sterna_wire::extension::{MigrationSecret, PreemptHello};
use sterna_wire::multifd::BlockTable;
use sterna_wire::ram::{BareRecord, BareRecordReader};

fn blocks() -> BlockTable {
    BlockTable::new([("m0".to_owned(), 0x2000), ("pc.bios".to_owned(), 0x2000)]).unwrap()
}

#[test]
fn records_are_read_as_a_qemu_writes_them() {
    let zero = b"\0\0\0\0\0\0\x10\x02\x07pc.bios\0";
    let page = b"\0\0\0\0\0\0\0\x28";
    let mut reader = BareRecordReader::new();

    let first = reader.decode(&blocks(), zero).unwrap();
    assert_eq!(first, Some((BareRecord::Zero { block: 1, offset: 0x1000 }, zero.len())));
    let second = reader.decode(&blocks(), page).unwrap();
    assert_eq!(second, Some((BareRecord::Page { block: 1, offset: 0 }, 8)), "of the same block");
    let end = reader.decode(&blocks(), b"\0\0\0\0\0\0\0\x10").unwrap();
    assert_eq!(end, Some((BareRecord::End, 8)));
    for count in 0..zero.len() {
        assert_eq!(reader.decode(&blocks(), &zero[..count]).unwrap(), None);
    }
}

#[test]
fn what_is_no_page_of_this_machine_is_refused() {
    for (bytes, word) in [
        (&b"\0\0\0\0\0\0\0\x28"[..], "CONTINUE"),
        (b"\0\0\0\0\0\0\0\x08\x02xx", "\"xx\""),
        (b"\0\0\0\0\0\0\x20\x08\x02m0", "beyond"),
        (b"\0\0\0\0\0\0\0\x02\x02m0\x01", "zero page"),
        (b"\0\0\0\0\0\0\0\x40", "not a page record"),
        (b"\0\0\0\0\0\0\x10\x10", "not a page record"),
    ] {
        let error = BareRecordReader::new().decode(&blocks(), bytes).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn hello_is_of_one_migration_and_one_connection() {
    let secret = MigrationSecret::from_bytes([3; 32]);
    let hello = PreemptHello::new([7; 16], &secret, &None);
    let mut bytes = Vec::new();
    hello.encode(&mut bytes);
    assert_eq!(bytes.len(), PreemptHello::BYTES);
    assert_eq!(bytes[..8], *b"STNP\0\0\0\x01");

    let (decoded, used) = PreemptHello::decode(&bytes).unwrap().unwrap();
    assert_eq!((decoded, used), (hello, bytes.len()));
    assert!(decoded.is_authentic(&secret, &None));
    assert!(!decoded.is_authentic(&secret, &Some([1; 32])), "moved into a TLS session");
    assert!(!decoded.is_authentic(&MigrationSecret::from_bytes([4; 32]), &None));
    bytes[10] ^= 1;
    let (other, _) = PreemptHello::decode(&bytes).unwrap().unwrap();
    assert!(!other.is_authentic(&secret, &None), "another migration's id");
    assert!(PreemptHello::decode(b"STNQ\0\0\0\x01").is_err());
    assert!(PreemptHello::decode(b"STNP\0\0\0\x02").is_err());
}
