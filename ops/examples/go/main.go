// Streams one answer: `go run . PROMPT [MAX_TOKENS]`. Ctrl-C cancels it.
//
// The daemon and the credentials are those of the command line: DOWNCORE_SERVER (unix:PATH or HOST:PORT), and where it
// wants any, DOWNCORE_TOKEN_FILE, DOWNCORE_TLS_CA, DOWNCORE_TLS_CERT, DOWNCORE_TLS_KEY.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "example.org/generate/downcorev1"
)

const (
	attempts = 5
	timeout  = 10 * time.Minute // for the whole answer; the daemon drops what it cannot finish by then

	// proto/downcore/v1/service_config.json, for the service that is called here: gRPC itself tries again where the
	// daemon cannot be reached or is restarting, as long as no message has come.
	serviceConfig = `{"methodConfig": [{
  "name": [{"service": "downcore.v1.GenerationService"}],
  "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
                  "retryableStatusCodes": ["UNAVAILABLE"]}
}]}`
)

func main() {
	if len(os.Args) < 2 || len(os.Args) > 3 {
		fail(2, "usage: generate PROMPT [MAX_TOKENS]")
	}
	maxTokens := uint64(64)
	if len(os.Args) == 3 {
		var err error
		if maxTokens, err = strconv.ParseUint(os.Args[2], 10, 32); err != nil {
			fail(2, err)
		}
	}
	target := os.Getenv("DOWNCORE_SERVER")
	if target == "" {
		fail(1, "set DOWNCORE_SERVER to unix:PATH or HOST:PORT")
	}
	transport := insecure.NewCredentials()
	secure := tlsConfig()
	if secure != nil {
		transport = credentials.NewTLS(secure)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx = withToken(ctx, secure != nil || isLocal(target))
	connection, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	)
	if err != nil {
		fail(1, err)
	}
	temperature, maxTokens32 := float32(0), uint32(maxTokens)
	request := &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: os.Args[1]},
		Sampling: &pb.SamplingParams{Temperature: &temperature},
		Stopping: &pb.StoppingParams{MaxTokens: &maxTokens32},
	}
	client := pb.NewGenerationServiceClient(connection)
	for attempt := 1; ; attempt++ {
		exit, retry := ask(ctx, client, request)
		if retry < 0 || attempt == attempts {
			os.Exit(exit)
		}
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			fail(130, "cancelled")
		}
	}
}

// ask makes one call. It returns the exit status, and after what time trying again makes sense; negative: it does not.
func ask(ctx context.Context, client pb.GenerationServiceClient, request *pb.GenerateRequest) (int, time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel() // whatever becomes of this function, the daemon does not go on
	hasBegun := false
	stream, err := client.Generate(ctx, request)
	for err == nil {
		var response *pb.GenerateResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		hasBegun = true
		switch event := response.Event.(type) {
		case *pb.GenerateResponse_Chunk:
			fmt.Print(event.Chunk.Text)
		case *pb.GenerateResponse_Summary:
			usage := event.Summary.Usage
			from := usage.GetCachedTokens()
			cached := from.GetDevice() + from.GetHost() + from.GetDisk()
			fmt.Println()
			fmt.Fprintf(os.Stderr, "prompt %d tokens, %d from the cache; answer %d tokens\n",
				usage.PromptTokens, cached, usage.CompletionTokens)
		}
	}
	if errors.Is(err, io.EOF) {
		return 0, -1
	}
	failure := status.Convert(err)
	if failure.Code() == codes.Canceled {
		fmt.Fprintln(os.Stderr, "\ncancelled")
		return 130, -1
	}
	reason, retry := detailsOf(failure)
	again := ""
	if retry >= 0 {
		again = fmt.Sprintf("; try again in %g s", retry.Seconds())
	}
	fmt.Fprintf(os.Stderr, "%s: %s [%s]%s\n", codeName(failure.Code()), failure.Message(), reason, again)
	if hasBegun {
		return 1, -1 // what has begun would be answered twice
	}
	return 1, retry
}

// detailsOf finds the daemon's reason, and the delay of its RetryInfo.
func detailsOf(failure *status.Status) (reason string, retry time.Duration) {
	reason, retry = "no reason", -1
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.RetryInfo:
			retry = detail.RetryDelay.AsDuration()
		}
	}
	return reason, retry
}

// codeName spells a code as the specification does: ResourceExhausted is RESOURCE_EXHAUSTED.
func codeName(code codes.Code) string {
	var name strings.Builder
	for place, letter := range code.String() {
		if place > 0 && letter >= 'A' && letter <= 'Z' {
			name.WriteByte('_')
		}
		name.WriteRune(letter)
	}
	return strings.ToUpper(name.String())
}

// tlsConfig trusts the authority that is named, and shows the client's own certificate where there is one.
func tlsConfig() *tls.Config {
	authority := os.Getenv("DOWNCORE_TLS_CA")
	if authority == "" {
		return nil
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		fail(1, err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		fail(1, authority+" holds no certificate")
	}
	if certificate := os.Getenv("DOWNCORE_TLS_CERT"); certificate != "" {
		pair, err := tls.LoadX509KeyPair(certificate, os.Getenv("DOWNCORE_TLS_KEY"))
		if err != nil {
			fail(1, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}

// withToken adds the token to a call's metadata. A token leaves this machine over TLS only.
func withToken(ctx context.Context, isSafe bool) context.Context {
	file := os.Getenv("DOWNCORE_TOKEN_FILE")
	if file == "" {
		return ctx
	}
	if !isSafe {
		fail(1, "a token leaves this machine over TLS only: set DOWNCORE_TLS_CA")
	}
	token, err := os.ReadFile(file)
	if err != nil {
		fail(1, err)
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+strings.TrimSpace(string(token)))
}

// isLocal tells whether nothing leaves this machine on the way there.
func isLocal(target string) bool {
	for _, start := range []string{"unix:", "127.0.0.1:", "localhost:", "[::1]:"} {
		if strings.HasPrefix(target, start) {
			return true
		}
	}
	return false
}

func fail(exit int, message any) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(exit)
}
