//! The bitmap after RECV_BITMAP: golden bytes, every cut, wrong sizes, and round trips.

use proptest::prelude::*;
use sterna_wire::Fault;
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

/// A QEMU 11's answer for a block of 128 pages.
///
/// The first 20 pages and page 127 have arrived.
fn golden() -> Vec<u8> {
    let mut bytes = vec![0, 5, 0, 3, 2, b'm', b'0'];
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 16]);
    bytes.extend([0xff, 0xff, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80]);
    bytes.extend([0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);
    bytes
}

#[test]
fn received_pages_of_golden_bytes_are_the_pages_that_came() {
    let bytes = golden();

    let (message, used) = ReturnMessage::decode(&bytes).unwrap().unwrap();
    let (pages, rest) = ReceivedPages::decode(&bytes[used..], 128).unwrap().unwrap();

    assert_eq!(message, ReturnMessage::ReceivedBitmap { block: "m0".into() });
    assert_eq!(used + rest, bytes.len());
    assert_eq!(rest as u64, ReceivedPages::encoded_bytes(128));
    let came: Vec<u64> = (0..200).filter(|page| pages.has(*page)).collect();
    assert_eq!(came, (0..20).chain([127]).collect::<Vec<_>>());
    assert_eq!(pages.missing(), 128 - 21);
    let mut again = Vec::new();
    message.encode(&mut again).unwrap();
    pages.encode(&mut again);
    assert_eq!(again, bytes);
}

#[test]
fn received_pages_cut_anywhere_need_more() {
    let bytes = &golden()[7..];

    for length in 0..bytes.len() {
        assert_eq!(ReceivedPages::decode(&bytes[..length], 128).unwrap(), None, "{length}");
    }
}

#[test]
fn received_pages_of_another_size_are_refused_before_they_come() {
    let bytes = &golden()[7..];

    for pages in [0, 64, 129, 1 << 40] {
        let error = ReceivedPages::decode(&bytes[..8], pages).unwrap_err();

        assert_eq!((error.offset, error.fault), (0, Fault::PeerMisbehaved), "{pages}: {error}");
        assert!(error.to_string().contains("specs/postcopy.md §5"), "{error}");
    }
}

#[test]
fn received_pages_with_another_end_mark_are_refused() {
    let mut bytes = golden();
    *bytes.last_mut().unwrap() ^= 1;

    let error = ReceivedPages::decode(&bytes[7..], 128).unwrap_err();

    assert_eq!(error.offset, 24);
}

#[test]
fn received_pages_after_the_last_page_are_ignored() {
    let mut bytes = vec![0, 0, 0, 0, 0, 0, 0, 8];
    bytes.extend([0xff; 8]);
    bytes.extend([0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);

    let (pages, _) = ReceivedPages::decode(&bytes, 9).unwrap().unwrap();

    assert_eq!(pages.words(), [0x1ff]);
}

proptest! {
    #[test]
    fn received_pages_that_were_encoded_decode_alike(
        pages in 0u64..2000,
        came in proptest::collection::vec(0u64..2100, 0..200),
    ) {
        let mut all = ReceivedPages::none(pages);
        came.iter().for_each(|page| all.add(*page));
        let mut bytes = Vec::new();
        all.encode(&mut bytes);

        prop_assert_eq!(bytes.len() as u64, ReceivedPages::encoded_bytes(pages));
        let used = bytes.len();
        bytes.extend([7; 3]);
        prop_assert_eq!(ReceivedPages::decode(&bytes, pages).unwrap(), Some((all, used)));
    }

    #[test]
    fn received_pages_of_any_bytes_are_read_or_refused(bytes: Vec<u8>, pages in 0u64..5000) {
        if let Ok(Some((read, used))) = ReceivedPages::decode(&bytes, pages) {
            prop_assert_eq!(used as u64, ReceivedPages::encoded_bytes(pages));
            prop_assert_eq!(read.pages(), pages);
        }
    }
}
