//! Runs the main channel's decoder for several targets.

use sterna_wire::limits::MAIN_STEP_BYTES;
use sterna_wire::main::{BodyKind, Expectations, MainDecoder, MainItem, SectionKind, Step};
use sterna_wire::{PAGE_SIZE, WireError};

/// A decoder whose expectations and knowledge are chosen by one byte of the input.
pub(super) fn decoder(choice: u8) -> MainDecoder {
    let bit = |index: u8| choice >> index & 1 == 1;
    let expect = Expectations {
        machine_type: bit(0).then(|| "none".to_owned()),
        uuid: bit(0).then_some([7; 16]),
        blocks: bit(1).then(|| vec![("m0".to_owned(), 4 << 20)]),
        multifd: bit(2),
        // With multifd, bit 3 chooses `accept_legacy_flush` instead.
        rdma: bit(3) && !bit(2),
        accept_legacy_flush: bit(3),
        mapped_ram: bit(4),
        ignore_shared: bit(5),
        postcopy: bit(6),
        background_snapshot: bit(7),
        no_description: bit(7),
        opaque_tail: bit(6) && bit(7),
        device_state_bytes: 1 << 20,
    };
    let knowledge = move |name: &str, _: u32, _: u32, _: SectionKind| match name {
        "ram" => BodyKind::Ram,
        "globalstate" => BodyKind::FixedLength(104),
        "refused" => BodyKind::Refuse("told to".to_owned()),
        name if name.ends_with("/stream") => BodyKind::Passing { most: 1 << 16 },
        name if name.starts_with("sterna/") => BodyKind::LengthPrefixed { most: 1 << 16 },
        _ => BodyKind::OpaqueByFooter,
    };
    MainDecoder::new(Box::new(knowledge), expect)
}

/// Decodes `stream`, which arrives in pieces of `piece` bytes. Returns the items with their positions, and the
/// error that ended it.
pub(super) fn run(choice: u8, stream: &[u8], piece: usize) -> (Vec<(MainItem, u64)>, Option<WireError>) {
    let mut decoder = decoder(choice);
    let (mut items, mut at, mut arrived) = (Vec::new(), 0usize, 0usize);
    loop {
        match decoder.next(&stream[at..arrived]) {
            Err(error) => {
                assert_eq!(decoder.next(&stream[at..arrived]), Err(error.clone()), "an error stays");
                assert!(error.paragraph.starts_with("specs/"));
                return (items, Some(error));
            }
            Ok(Step::End) => return (items, None),
            Ok(Step::NeedMore(needed)) => {
                assert!(needed > arrived - at, "asks for {needed}, has {}", arrived - at);
                assert!(needed <= MAIN_STEP_BYTES);
                if arrived == stream.len() {
                    return (items, decoder.end_of_file(stream.len() - at).err());
                }
                arrived = arrived.saturating_add(piece).min(stream.len());
            }
            Ok(Step::Partial { consumed }) => {
                assert!(consumed > 0 && consumed <= arrived - at);
                at += consumed;
            }
            Ok(Step::Item { item, consumed }) => {
                assert!(consumed <= arrived - at);
                at += consumed;
                match &item {
                    MainItem::PagePayloadFollows { block, offset } => {
                        check_place(&decoder, *block, *offset);
                        if stream.len() - at < PAGE_SIZE {
                            return (items, None);
                        }
                        at += PAGE_SIZE;
                        decoder.payload_consumed();
                    }
                    MainItem::Zero { block, offset } | MainItem::Xbzrle { block, offset, .. } => {
                        check_place(&decoder, *block, *offset);
                    }
                    // Items of which the rest is elsewhere in a file. Here the next bytes follow directly.
                    _ => {}
                }
                arrived = arrived.max(at);
                items.push((item, decoder.position()));
            }
        }
    }
}

fn check_place(decoder: &MainDecoder, block: usize, offset: u64) {
    let blocks = decoder.blocks().expect("pages come after the block list");
    assert_eq!(offset % PAGE_SIZE as u64, 0);
    assert!(offset + PAGE_SIZE as u64 <= blocks.length_bytes(block));
}
