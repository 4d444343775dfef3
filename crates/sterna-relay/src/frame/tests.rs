//! Tests of encoders and decoders with the values of `specs/relay.md`.

use super::*;

fn frames() -> Vec<Frame> {
    vec![
        Frame::Open { flow: 1, credit: 65_536 },
        Frame::Data { flow: 1, offset: 7, length: 3 },
        Frame::Finish { flow: 2, offset: 10 },
        Frame::Reset { flow: 3, offset: 11, reason: ResetReason::Unreachable },
        Frame::Stop { flow: 4, reason: ResetReason::Broken },
        Frame::Ack { flow: 5, received: 3, delivered: 2, credit: 9, has_end: true, has_stop: false },
        Frame::Sync,
        Frame::Ping(u64::MAX),
        Frame::Pong(2),
        Frame::Over { verdict: Verdict::Passed, text: "é".into() },
        Frame::Packed { flow: 6, head: packed_head(), payload: 9 },
        Frame::Miss { flow: 7, offset: 12 },
        Frame::Have { stay: true, hashes: vec![u64::MAX, 0] },
    ]
}

fn packed_head() -> PackedHead {
    PackedHead { offset: 5, check: u64::MAX, length: 8200, pages: 2, method: Method::Zstd }
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out).unwrap();
    out
}

fn decoded(bytes: &[u8]) -> Result<Frame, FrameError> {
    let (head, body) = bytes.split_first_chunk().unwrap();
    let head = Head::decode(head)?;
    head.body(&body[..head.fixed_bytes().min(body.len())])
}

#[test]
fn frame_of_every_kind_comes_back() {
    let all: Vec<_> = frames().iter().map(Frame::kind).collect();
    assert_eq!(all, Kind::ALL);
    for frame in frames() {
        assert_eq!(decoded(&encoded(&frame)), Ok(frame.clone()), "{frame:?}");
    }
}

#[test]
fn frame_of_data_has_the_specifications_bytes() {
    let bytes = encoded(&Frame::Data { flow: 0x0102_0304, offset: 5, length: 0x0102 });

    assert_eq!(bytes, [2, 0, 1, 10, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 5]);
}

#[test]
fn head_with_a_length_that_the_kind_does_not_have_is_refused_before_the_body_is_read() {
    for (kind, bytes) in [
        (1, 7),
        (1, 9),
        (2, 8),
        (2, 9 + DATA_BYTES),
        (7, 1),
        (10, 5 + TEXT_BYTES),
        (11, 25 + PACKED_BYTES),
        (12, 9),
    ] {
        let [_, length @ ..] = (bytes as u32).to_be_bytes();
        let flow = u8::from(!(7..=10).contains(&kind));
        let error = Head::decode(&[kind, length[0], length[1], length[2], 0, 0, 0, flow]).unwrap_err();
        assert!(matches!(error.rule, Rule::Length { bytes: b, .. } if b == bytes), "{error}");
    }
}

#[test]
fn field_that_breaks_a_rule_is_named_with_its_frame_flow_and_byte() {
    let changed = |frame: &Frame, at: usize, to: u8| {
        let mut bytes = encoded(frame);
        bytes[at] = to;
        decoded(&bytes).unwrap_err()
    };
    let all = frames();
    for (at, byte, to, rule) in [
        (0, 0, 99, Rule::Kind(99)),
        (0, 7, 0, Rule::Flow(0)),
        (6, 7, 1, Rule::Flow(1)),
        (2, 8, 0x40, Rule::Offset(OFFSETS + 10)),
        (3, 19, 5, Rule::Reason(5)),
        (4, 11, 0, Rule::Reason(0)),
        (5, 35, 4, Rule::Flags(4)),
        (9, 11, 2, Rule::Verdict(2)),
        (9, 12, 0xff, Rule::Text),
        (10, 8, 0x40, Rule::Offset(OFFSETS + 5)),
        (10, 25, 0xff, Rule::Unpacked(0x00ff_2008)),
        (10, 29, 65, Rule::Pages(65)),
        (10, 31, 2, Rule::Method(2)),
        (12, 11, 2, Rule::Flags(2)),
    ] {
        assert_eq!(changed(&all[at], byte, to).rule, rule);
    }
    let error = changed(&all[3], 19, 5);
    assert_eq!((error.frame, error.flow, error.offset), ("RESET", 3, 16));
    assert!(error.to_string().contains("specs/relay.md §3"), "{error}");
}

#[test]
fn encode_of_more_than_the_protocol_allows_is_refused() {
    let mut out = Vec::new();
    for frame in [
        Frame::Data { flow: 1, offset: 0, length: DATA_BYTES + 1 },
        Frame::Data { flow: 1, offset: 0, length: 0 },
        Frame::Open { flow: 0, credit: 0 },
        Frame::Finish { flow: 1, offset: OFFSETS },
        Frame::Over { verdict: Verdict::Never, text: "x".repeat(TEXT_BYTES + 1) },
    ] {
        assert!(frame.encode(&mut out).is_err(), "{frame:?}");
    }
    assert!(out.is_empty());
}

fn key(secret: Option<u8>) -> SessionKey {
    let secret = secret.map(|byte| SharedSecret::from_file(&[byte; 32]).unwrap());
    SessionKey::new(secret.as_ref(), SessionId([1; 16]), &[2; 32])
}

fn hello(purpose: Purpose, key: &SessionKey, binding: &Binding) -> Hello {
    hello_with(None, purpose, key, binding)
}

fn hello_with(offer: Option<Offer>, purpose: Purpose, key: &SessionKey, binding: &Binding) -> Hello {
    let share = if purpose == Purpose::Open { [2; 32] } else { [0; 32] };
    let route = "web1".parse().unwrap();
    Hello::new(SessionId([1; 16]), purpose, (1, 2), 3, [4; 16], share, route, offer, key, binding)
}

#[test]
fn hello_comes_back_and_proves_the_key_and_the_connection() {
    let offer = Some(Offer { packs: true, cache_pages: 0 });
    for (offer, purpose, binding) in
        [(None, Purpose::Open, None), (offer, Purpose::Join, Some([9; 32])), (offer, Purpose::Open, None)]
    {
        let key = key(Some(5));
        let hello = hello_with(offer, purpose, &key, &binding);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        for length in 0..bytes.len() {
            assert_eq!(Hello::decode(&bytes[..length]), Ok(None));
        }
        let (back, used) = Hello::decode(&bytes).unwrap().unwrap();
        assert_eq!((&back, used), (&hello, bytes.len()));
        assert!(back.is_authentic(&key, &binding));
        assert!(!back.is_authentic(&key, &Some([8; 32])), "another connection");
        assert!(!back.is_authentic(&self::key(Some(6)), &binding), "another secret");
        assert!(!back.is_authentic(&self::key(None), &binding), "no secret");
    }
}

#[test]
fn hello_with_a_wrong_field_is_refused() {
    let mut good = Vec::new();
    hello(Purpose::Open, &key(None), &None).encode(&mut good);
    for (at, to, rule) in [
        (0, 0, Rule::Magic(0x0054_4e54)),
        (7, 3, Rule::Version(3)),
        (24, 2, Rule::Purpose(2)),
        (24, 1, Rule::Share),
        (25, 2, Rule::Lane { lane: 2, lanes: 2 }),
        (26, LANES + 1, Rule::Lane { lane: 1, lanes: LANES + 1 }),
        (27, 0, Rule::Route),
        (27, 65, Rule::Route),
        (31, 0, Rule::Attempt),
        (Hello::HEAD_BYTES, b'.', Rule::Route),
        (Hello::HEAD_BYTES + 1, b'/', Rule::Route),
    ] {
        let mut bytes = good.clone();
        bytes[at] = to;
        assert_eq!(Hello::decode(&bytes).unwrap_err().rule, rule);
    }
}

#[test]
fn answer_and_confirm_fit_one_hello_only() {
    let key = key(None);
    let ours = hello(Purpose::Open, &key, &None);
    let other = hello(Purpose::Open, &key, &Some([1; 32]));
    for status in [Status::Welcome, Status::OverNever, Status::RouteBusy] {
        let answer = Answer::new(status, Offer::default(), [7; 16], &ours, &key, &None);
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        let back = Answer::decode(&bytes.try_into().unwrap()).unwrap();
        assert_eq!(back, answer);
        assert!(back.is_authentic(&ours, &key, &None));
        assert!(!back.is_authentic(&ours, &key, &Some([1; 32])), "moved to another connection");
        let confirm = Confirm::new(&ours, &answer, &key, &None);
        assert!(Confirm::from_bytes(confirm.to_bytes()).is_authentic(&ours, &answer, &key, &None));
        let again = Answer::new(status, Offer::default(), [8; 16], &ours, &key, &None);
        assert!(!confirm.is_authentic(&ours, &again, &key, &None), "replayed to another answer");
        assert!(!confirm.is_authentic(&other, &answer, &key, &Some([1; 32])));
    }
    let claim = Answer::without_proof(Status::OverNever);
    assert!(!claim.is_authentic(&ours, &key, &None));
}

#[test]
fn answer_accepts_no_more_than_the_hello_offers() {
    let key = key(None);
    let accepts = Offer { packs: true, cache_pages: 77 };
    for (offer, agreed) in [
        (None, None),
        (Some(Offer::default()), Some(Offer::default())),
        (Some(Offer { packs: true, cache_pages: 0 }), Some(accepts)),
    ] {
        let hello = hello_with(offer, Purpose::Open, &key, &None);
        let answer = Answer::new(Status::Welcome, accepts, [7; 16], &hello, &key, &None);
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        let back = Answer::decode(&bytes.clone().try_into().unwrap()).unwrap();
        assert_eq!((back, back.accepts), (answer, agreed));
        // A relay of version 1 understands the answer to a hello of version 1.
        assert_eq!(bytes[7], if offer.is_some() { 2 } else { 1 });
        bytes[15] = 2;
        let error = Answer::decode(&bytes.try_into().unwrap()).unwrap_err();
        assert!(matches!(error.rule, Rule::Reserved(2) | Rule::Offer(2)), "{error}");
    }
    let mut bytes = Vec::new();
    hello_with(Some(Offer::default()), Purpose::Open, &key, &None).encode(&mut bytes);
    bytes[83] = 2;
    assert_eq!(Hello::decode(&bytes).unwrap_err().rule, Rule::Offer(2));
}

#[test]
fn page_that_does_not_fit_the_frame_is_refused() {
    let mut payload = Vec::new();
    let (page, reference) = (NamedPage { gap: 8, hash: None }, NamedPage { gap: 0, hash: Some([3; 32]) });
    [page, reference].iter().for_each(|page| page.encode(&mut payload));
    assert_eq!(NamedPage::decode_all(6, &packed_head(), &payload), Ok((vec![page, reference], 40)));
    for length in 0..40 {
        let error = NamedPage::decode_all(6, &packed_head(), &payload[..length]).unwrap_err();
        assert_eq!((error.rule, error.flow), (Rule::Short, 6));
    }
    let short = PackedHead { length: 8199, ..packed_head() };
    let error = NamedPage::decode_all(6, &short, &payload).unwrap_err();
    assert_eq!(error.rule, Rule::PageOutside { ends: 8200, length: 8199 });
}

#[test]
fn secret_file_has_32_bytes_or_64_digits() {
    let digits = b"00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF\n";
    assert!(SharedSecret::from_file(digits).is_some());
    assert!(SharedSecret::from_file(&digits[..64]).is_some());
    assert!(SharedSecret::from_file(&[7; 32]).is_some());
    for bad in [&[0; 32][..], &[7; 31], b"", &digits[..63], &[b'g'; 64]] {
        assert!(SharedSecret::from_file(bad).is_none());
    }
}

#[test]
fn route_names_lead_out_of_no_directory() {
    for good in ["web1", "a.b-c_D", &"x".repeat(64)] {
        assert_eq!(good.parse::<RouteName>().unwrap().as_str(), good);
    }
    for bad in ["", ".", "..", ".a", "a/b", "a b", "a\0", "ä", &"x".repeat(65)] {
        assert!(bad.parse::<RouteName>().is_err(), "{bad:?}");
    }
}
