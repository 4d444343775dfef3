use super::*;

fn secret(byte: u8) -> MigrationSecret {
    MigrationSecret::from_bytes([byte; MigrationSecret::BYTES])
}

fn hello(channel: ReconnectChannel) -> ReconnectHello {
    ReconnectHello::new([1; 16], (3, channel), [9; 16], &secret(7), &None)
}

#[test]
fn hello_proves_every_byte_of_itself_and_its_connection() {
    for channel in [
        ReconnectChannel::Main,
        ReconnectChannel::Lane(0),
        ReconnectChannel::Lane(255),
        ReconnectChannel::GivesUp,
        ReconnectChannel::Recovery,
        ReconnectChannel::Preempt,
    ] {
        let mut bytes = Vec::new();
        hello(channel).encode(&mut bytes);
        let (read, used) = ReconnectHello::decode(&bytes).unwrap().unwrap();

        assert_eq!((read, used, bytes.len()), (hello(channel), ReconnectHello::BYTES, ReconnectHello::BYTES));
        assert!(read.is_authentic(&secret(7), &None));
        assert!(!read.is_authentic(&secret(8), &None));
        assert!(!read.is_authentic(&secret(7), &Some([0; 32])), "moved to a TLS session");
        for at in 0..bytes.len() {
            assert_eq!(ReconnectHello::decode(&bytes[..at]), Ok(None));
            let mut broken = bytes.clone();
            broken[at] ^= 1;
            let is_taken = ReconnectHello::decode(&broken)
                .is_ok_and(|read| read.unwrap().0.is_authentic(&secret(7), &None));
            assert!(!is_taken, "byte {at}");
        }
    }
    let mut bytes = Vec::new();
    hello(ReconnectChannel::Lane(255)).encode(&mut bytes);
    bytes[31] = 1;
    assert!(ReconnectHello::decode(&bytes).unwrap_err().to_string().contains("channel 00000101"));
}

#[test]
fn answer_is_valid_for_its_hello_and_as_a_whole() {
    let (asked, other) = (hello(ReconnectChannel::Main), hello(ReconnectChannel::Lane(1)));
    let holds = Holds { session: 2, rounds: 77, pages: vec![1, 2, 3] };
    for answer in [ReconnectAnswer::Holds(holds), ReconnectAnswer::Over] {
        let mut bytes = Vec::new();
        answer.encode(&asked, &secret(7), &None, &mut bytes);
        let (head, used) = ReconnectAnswerHead::decode(&bytes, 3).unwrap().unwrap();
        let pages = bytes[used..].to_vec();

        assert_eq!((used, head.pages_bytes as usize), (ReconnectAnswerHead::BYTES, pages.len()));
        let whole = head.with_pages(pages.clone(), &asked, &secret(7), &None);
        assert_eq!(whole, Some(answer));
        assert_eq!(head.with_pages(pages.clone(), &other, &secret(7), &None), None);
        assert_eq!(head.with_pages(pages.clone(), &asked, &secret(8), &None), None);
        assert_eq!(head.with_pages(pages.clone(), &asked, &secret(7), &Some([1; 32])), None);
        for at in 8..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1;
            let Ok(Some((head, used))) = ReconnectAnswerHead::decode(&broken, 1000) else { continue };
            assert_eq!(
                head.with_pages(broken[used..].to_vec(), &asked, &secret(7), &None),
                None,
                "byte {at}"
            );
        }
        if !pages.is_empty() {
            assert!(ReconnectAnswerHead::decode(&bytes, 2).unwrap_err().to_string().contains("at most 2"));
        }
    }
}

#[test]
fn held_pages_come_back_as_they_were() {
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..300 {
        let blocks: Vec<u64> = (0..random.usize(1..5)).map(|_| random.u64(0..3000)).collect();
        let mut runs = Vec::new();
        let mut bytes = Vec::new();
        for (block, pages) in blocks.iter().enumerate() {
            let (mut of_block, mut at) = (Vec::new(), random.u64(0..3));
            while at < *pages {
                let longest = random.u64(1..400);
                let count = random.u64(1..=longest).min(pages - at);
                of_block.push((at, count));
                at += count + random.u64(1..=longest);
            }
            encode_held(*pages, of_block.iter().copied(), &mut bytes);
            runs.extend(of_block.into_iter().map(|(first, count)| (block, first, count)));
        }
        let mut read = Vec::new();
        decode_held(&bytes, &blocks, |block, first, count| read.push((block, first, count))).unwrap();

        assert_eq!(read, runs);
        assert!(bytes.len() as u64 <= most_held_bytes(&blocks));
        let Some(last) = bytes.pop() else { continue };
        assert!(decode_held(&bytes, &blocks, |_, _, _| ()).is_err());
        bytes.extend([last, 0]);
        assert!(decode_held(&bytes, &blocks, |_, _, _| ()).is_err());
    }
}

#[test]
fn held_pages_of_most_runs_fit_the_bound() {
    let pages = 4097;
    let mut bytes = Vec::new();
    encode_held(pages, (0..pages).step_by(2).map(|page| (page, 1)), &mut bytes);
    assert_eq!(bytes.len() as u64, most_held_bytes(&[pages]));
}

#[test]
fn held_pages_that_break_a_rule_are_refused() {
    let refused = |bytes: &[u8]| decode_held(bytes, &[10, 300], |_, _, _| ()).unwrap_err().to_string();
    for (bytes, rule) in [
        (&[11][..], "beyond its block"),
        (&[3, 0, 7], "empty run"),
        (&[0, 0], "empty run"),
        (&[0x83, 0], "overlong"),
        (&[0xff; 11], "overlong"),
        (&[10, 0xac], "missing or overlong number"),
        (&[10, 0xac, 2, 1], "after the last block"),
    ] {
        assert!(refused(bytes).contains(rule), "{bytes:?}: {}", refused(bytes));
    }
    assert_eq!(decode_held(&[10, 0xac, 2], &[10, 300], |_, _, _| panic!()), Ok(()));
}
