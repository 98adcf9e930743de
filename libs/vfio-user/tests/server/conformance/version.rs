//! VERSION.

use super::*;

/// Points 15 to 18.
#[test]
fn a_session_begins_with_a_valid_version() {
    let version = |json: &str| [&[0, 0, 1, 0], json.as_bytes()].concat();
    let deep = format!("{}{}\0", "[".repeat(10_000), "]".repeat(10_000));
    let long = format!("{{\"capabilities\":{{}}}}{}\0", " ".repeat(1 << 20));
    let bad = [
        vec![],
        vec![0, 0],
        vec![1, 0, 0, 0],
        version("{}"),
        version("{\"capabilities\":\0"),
        version("\0"),
        version("[]\0"),
        version("{\"capabilities\":[]}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":-1}}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":1e99}}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":\"8\"}}\0"),
        version("{\"capabilities\":{\"max_msg_fds\":5000}}\0"),
        version("{\"capabilities\":{\"max_data_xfer_size\":0}}\0"),
        version(&deep),
        version(&long[long.len() - (1 << 20) + 20..]),
    ];
    for body in bad {
        let (mut client, served) = connect(&Plain::new());
        let text = String::from_utf8_lossy(&body);
        assert_eq!(client.call_raw(CommandCode::VERSION, &body, &[]).err(), Some(EINVAL), "{text:.60}");
        assert!(client.is_closed());
        assert!(matches!(
            served.outcome(),
            Err(ServeError::Session(SessionError::NotNegotiated(CommandCode::VERSION)))
        ));
    }
    for code in [2, 4, 9, 13, 999] {
        let (mut client, _served) = connect(&Plain::new());
        assert_eq!(client.call_raw(CommandCode(code), &[0; 32], &[]).unwrap_err(), EINVAL);
        assert!(client.is_closed());
    }
    // A descriptor.
    let (mut client, _served) = connect(&Plain::new());
    let file = memory("version", 1);
    assert_eq!(client.call_raw(CommandCode::VERSION, &version("{}\0"), &[file.as_fd()]).unwrap_err(), EINVAL);
}

/// Points 16, 17 and 19.
#[test]
fn our_version_is_one_that_every_client_takes() {
    for (minor, json, answer) in [
        (0, "", 0),
        (1, "{}\0", 1),
        (7, "{\"capabilities\":{}}\0", 1),
        (
            1,
            "{\"capabilities\":{\"max_msg_fds\":16,\"migration\":{\"pgsize\":4096},\"new\":[1]},\"x\":0}\0",
            1,
        ),
    ] {
        let (mut client, _served) = connect(&Plain::new());
        let body = [&[0, 0, minor, 0], json.as_bytes()].concat();
        let reply = client.call_raw(CommandCode::VERSION, &body, &[]).unwrap();
        assert!(reply.body.len() <= 4 + 193 && reply.body.ends_with(b"}}\0") && reply.descriptors.is_empty());
        assert_eq!(reply.body[..4], [0, 0, answer, 0]);
        let text = std::str::from_utf8(&reply.body[4..reply.body.len() - 1]).unwrap();
        assert!(text.contains("\"pgsizes\":4096") && text.contains("\"max_msg_fds\":16"), "{text}");
        assert!(!text.contains("twin_socket") && !text.contains("write_multiple"), "{text}");
        alive(&mut client);
    }
}

/// Point 21.
#[test]
fn a_second_version_changes_nothing() {
    let (mut client, _served) = open(&Plain::new());
    client.map(&by_messages(0, 0x1000), None).unwrap();
    assert_eq!(client.call(&Command::Version(Version::proposal()), &[]).unwrap_err(), EINVAL);
    client.unmap(0, 0x1000).unwrap();
    alive(&mut client);
}
